import pytest

from mula_titan.hf.layout import hf_tensors
from mula_titan.hf.names import NATIVE_TO_HF, hf_name, native_name
from tests.hf.tiny_models import MODELS, tiny_args


@pytest.mark.parametrize("native", NATIVE_TO_HF)
def test_names_map_back(native):
    key = native.format(13)
    name = hf_name(key)
    assert native_name(name.format(7)) == (key, 7 if "{}" in name else None)


def test_names_without_a_counterpart():
    assert hf_name("layers.0.attention.wq.bias") is None
    assert native_name("model.layers.0.mlp.experts.gate_up_proj") is None


@pytest.mark.parametrize("kind", MODELS)
def test_layout_has_no_name_twice(kind):
    names = [part.name for parts in hf_tensors(tiny_args(kind)).values() for part in parts]
    assert len(names) == len(set(names))
    # Per layer: q k v o, two norms and two QK-norms where there are any, gate, three matrices per expert.
    per_layer = 4 + 4 + 1 + 3 * 8 if kind.startswith("moe") else 4 + 3
    outer = 1 + (not kind.endswith("tied")) + kind.startswith("moe")
    assert len(names) == 2 * per_layer + outer
