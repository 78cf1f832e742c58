"""The place of a test's configuration."""

from pathlib import Path

import pytest

from tests.config.cases import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder with an (empty) data folder."""
    (tmp_path / "data").mkdir()
    return Place(tmp_path)
