"""Parameter counts of the paper's models, on the meta device."""

import pytest
import torch

from mula_titan.model import model_registry

# Billions, total and active, as published (arXiv 2604.00785).
SIZES = {
    "mula_1b": (1.28, 1.28),
    "mula_7b_a1b": (6.92, 1.28),
    "mula_20b_a2b": (20.1, 2.36),
    "mula_100b_a7b": (100.0, 7.58),
    "mula_220b_a10b": (220.2, 10.0),
}


def _rounded_like(value: float, published: float) -> float:
    digits = len(str(published).partition(".")[2])
    return round(value, digits)


@pytest.mark.parametrize("flavor", SIZES)
def test_total_and_active_parameters(flavor: str) -> None:
    config = model_registry(flavor).model
    with torch.device("meta"):
        model = config.build()
    total, flops = config.get_nparams_and_flops(model, seq_len=2048)
    active = config.num_active_params(model)
    want_total, want_active = SIZES[flavor]
    assert _rounded_like(total / 1e9, want_total) == want_total
    assert _rounded_like(active / 1e9, want_active) == want_active
    # 6 per active matrix parameter (embedding excluded) and causal attention.
    embedding = config.vocab_size * config.dim
    assert flops == 6 * (active - embedding) + 6 * len(config.layers) * config.dim * 2048


def test_unknown_flavor_and_field_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown model flavor 'mula_8b'; known: .*mula_7b_a1b"):
        model_registry("mula_8b")
    with pytest.raises(ValueError, match="unknown model field 'experts'"):
        model_registry("mula_debug", experts=4)
    with pytest.raises(ValueError, match=r"model.top_k = 9: must lie in 1..num_experts \(8\)"):
        model_registry("mula_debug", top_k=9)
