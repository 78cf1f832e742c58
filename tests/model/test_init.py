"""Initial weights: right distribution, all streams different, no dependence on how a parameter is cut."""

import math

import pytest
import torch

from mula_titan.model import init, model_registry


def test_standard_normal_has_the_moments_of_a_normal() -> None:
    x = init.standard_normal(torch.arange(1_000_000), seed=3, name="w").double()
    assert torch.isfinite(x).all()
    error = 5 / math.sqrt(len(x))  # five standard errors of a unit-variance mean
    assert abs(float(x.mean())) < error
    assert abs(float((x**2).mean()) - 1) < error * math.sqrt(2)
    assert abs(float((x**4).mean()) - 3) < error * math.sqrt(96)
    neighbours = float((x[1:] * x[:-1]).mean())
    assert abs(neighbours) < error
    assert 4.3 < float(x.abs().max()) < 6.7


def test_streams_of_names_and_seeds_are_unrelated() -> None:
    index = torch.arange(100_000)
    base = init.standard_normal(index, seed=3, name="w")
    for other in (
        init.standard_normal(index, seed=4, name="w"),
        init.standard_normal(index, seed=3, name="v"),
        init.standard_normal(index + 1, seed=3, name="w"),
    ):
        assert abs(float((base * other).mean())) < 5 / math.sqrt(len(index))


def test_values_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = torch.empty(7, 5, 3), torch.full((7, 5, 3), math.nan)
    init.fill_normal(whole, std=0.5, seed=1, name="w")
    monkeypatch.setattr(init, "_CHUNK", 30)
    init.fill_normal(chunked, std=0.5, seed=1, name="w")
    assert torch.equal(whole, chunked)
    assert torch.equal(whole.flatten(), init.standard_normal(torch.arange(105), seed=1, name="w") * 0.5)


def test_no_two_layers_experts_or_matrices_are_alike() -> None:
    spec = model_registry("mula_debug", dim=16, ffn_dim=16, n_layers=2, vocab_size=16)
    model = spec.model.build()
    model.init_states()
    blocks = []
    for name, param in model.named_parameters():
        if param.ndim < 2:
            assert torch.equal(param, torch.ones_like(param)), name
        else:
            blocks += list(param) if param.ndim == 3 else [param]
    for i, a in enumerate(blocks):
        for b in blocks[i + 1 :]:
            if a.shape == b.shape:
                assert not torch.equal(a, b)
