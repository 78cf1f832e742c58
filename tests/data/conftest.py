"""Fixtures of the tests in this folder."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_cases import SEQ_LEN


@pytest.fixture
def counting_file(tmp_path: Path) -> Callable[[int], Path]:
    """Makes an int32 .npy of 0, 1, 2, ... that holds n windows of SEQ_LEN: window w begins with token w * SEQ_LEN."""

    def make(windows: int, name: str = "counting.npy") -> Path:
        path = tmp_path / name
        np.save(path, np.arange(windows * SEQ_LEN + 1, dtype=np.int32))
        return path

    return make
