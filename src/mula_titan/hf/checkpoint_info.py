"""``model_args.json`` inside a checkpoint folder: what export must know beside the tensors."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mula_titan.model.args import MulaArgs

FILE_NAME = "model_args.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of the model in a checkpoint folder."""

    args: MulaArgs
    """Architecture of the model."""

    hf_assets_path: str | None
    """Absolute path of the folder with the tokenizer, or None if the model came without one."""


def write_checkpoint_info(folder: Path, args: MulaArgs, hf_assets_path: str | None) -> None:
    """Write ``model_args.json`` into a checkpoint folder, atomically.

    Args:
        folder: existing DCP folder (``checkpoint/step-N``).
        args: architecture of the model.
        hf_assets_path: folder of the tokenizer; a relative path is made absolute. None or "" if there is none.
    """
    assets = str(Path(hf_assets_path).resolve()) if hf_assets_path else None
    text = json.dumps({"model": asdict(args), "hf_assets_path": assets}, indent=2)
    partial = folder / f"{FILE_NAME}.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, folder / FILE_NAME)


def read_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Read ``model_args.json`` of a checkpoint folder.

    Raises:
        ValueError: no such file, no valid JSON, or a model field that this version doesn't know.
    """
    path = folder / FILE_NAME
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        model, assets = stored["model"], stored["hf_assets_path"]
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, so the architecture is unknown. It is written with each checkpoint; "
            "copy it from another checkpoint of the same run."
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no model description ({error}). Copy it from another checkpoint.") from error
    unknown = sorted(model.keys() - {field.name for field in fields(MulaArgs)})
    if unknown:
        raise ValueError(f"{path}: unknown model fields {unknown}. Use the mula-titan version that wrote it.")
    return CheckpointInfo(args=MulaArgs(**model), hf_assets_path=assets)
