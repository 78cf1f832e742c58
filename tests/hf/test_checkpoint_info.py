import json

import pytest

from mula_titan.hf.checkpoint_info import FILE_NAME, read_checkpoint_info, write_checkpoint_info
from tests.hf.tiny_models import tiny_args


def test_every_field_comes_back_and_a_relative_tokenizer_path_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = tiny_args("moe_gqa", load_balance_per_layer=True, router_z_loss=0.5)
    write_checkpoint_info(tmp_path, args, "assets/tokenizer")
    info = read_checkpoint_info(tmp_path)
    assert info.args == args and info.hf_assets_path == str(tmp_path / "assets" / "tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    write_checkpoint_info(tmp_path, args, "")
    assert read_checkpoint_info(tmp_path).hf_assets_path is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model_args\.json is missing"),
        ("{", "is no model description"),
        (json.dumps({"model": {}}), "is no model description.*hf_assets_path"),
        (json.dumps({"model": {"n_experts": 8}, "hf_assets_path": None}), r"unknown model fields \['n_experts'\]"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_checkpoint_info(tmp_path)
