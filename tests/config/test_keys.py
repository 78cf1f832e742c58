"""The public surface: keys appear and vanish on purpose only, and the documentation has them all."""

import re
from pathlib import Path

import pytest

from tests.config.cases import ROOT
from tests.config.test_overlay import document_config

HINT = "If that is intended, run `python scripts/document_config.py` and commit what it writes."


def test_keys_are_frozen() -> None:
    frozen = set((ROOT / "tests" / "config" / "keys.txt").read_text().split())
    keys = set(document_config.key_list().split())
    new, gone = sorted(keys - frozen), sorted(frozen - keys)
    assert not new, f"new configuration keys: {new}. {HINT}"
    assert not gone, f"configuration keys that users may have in their files are gone: {gone}. {HINT}"


def test_every_key_is_described() -> None:
    nameless = [key.name for key in document_config.all_keys() if not key.text]
    assert not nameless, f"describe {nameless} below the field, or torchtitan's in scripts/torchtitan_keys.toml"


def test_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert document_config.page(text) == text, "run `python scripts/document_config.py`"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if not (page.parent / link).exists()]
    assert not gone
