"""A configuration that is right, to be spoilt or changed by one thing."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mula_titan.toml_config import ConfigError, load_config
from mula_titan.validate import validate

ROOT = Path(__file__).resolve().parent.parent.parent


class Place(NamedTuple):
    """Existing folders for a run."""

    folder: Path

    @property
    def toml(self) -> Path:
        """The configuration file of a test."""
        return self.folder / "run.toml"

    def flags(self) -> list[str]:
        """Flags that name the folders: data, tokenizer, output."""
        return [
            f"--dataloader.dataset_path={self.folder / 'data'}",
            f"--validator.dataloader.dataset_path={self.folder / 'data'}",
            f"--hf_assets_path={ROOT / 'assets' / 'tokenizer'}",
            f"--dump_folder={self.folder / 'out'}",
        ]

    def load(self, text: str, *flags: str, ranks: int = 1, flavor: str = "mula_debug") -> Any:
        """Write the file, load it and check it for so many ranks."""
        if "flavor" not in text and "config =" not in text:
            text = f"model.flavor = '{flavor}'\n{text}"
        self.toml.write_text(text)
        config, values = load_config(self.toml, [*self.flags(), *flags])
        validate(config, values, ranks)
        return config

    def refusal(self, text: str, *flags: str, **options: Any) -> str:
        """Message with which a configuration is refused, the file's folder left out."""
        with pytest.raises(ConfigError) as error:
            self.load(text, *flags, **options)
        return str(error.value).replace(f"{self.folder}/", "")
