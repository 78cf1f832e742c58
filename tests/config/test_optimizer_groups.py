"""Which parameters decay."""

import pytest
import torch

from mula_titan.components.optimizer import AdamWContainer
from mula_titan.model import model_registry


def groups(flavor: str, **optimizer: object) -> dict[str, dict]:
    """Settings of the parameter group of each parameter of a model."""
    with torch.device("meta"):
        model = model_registry(flavor).model.build()
    container = AdamWContainer(AdamWContainer.Config(implementation="for-loop", **optimizer), model_parts=[model])
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for optimizer_ in container.optimizers:
        for group in optimizer_.param_groups:
            for param in group["params"]:
                assert id(param) in names
                assert names[id(param)] not in found
                found[names[id(param)]] = group
    assert set(found) == set(names.values())
    return found


def test_norms_and_embedding_do_not_decay() -> None:
    found = groups("mula_debug", weight_decay=0.3, lr=0.5, beta1=0.8, beta2=0.7, eps=1e-3)
    undecayed = {name for name, group in found.items() if group["weight_decay"] == 0}
    layer = {"attention_norm", "ffn_norm", "attention.qkv_linear.q_norm", "attention.qkv_linear.k_norm"}
    expected = {f"layers.{index}.{name}.weight" for index in range(4) for name in layer}
    assert undecayed == expected | {"norm.weight", "tok_embeddings.weight"}
    decayed = {name: group for name, group in found.items() if name not in undecayed}
    assert {group["weight_decay"] for group in decayed.values()} == {0.3}
    # Experts, router, projections and the output head.
    for name in ("layers.0.moe.router.gate.weight", "lm_head.weight", "layers.3.attention.wo.weight"):
        assert name in decayed
    assert sum("inner_experts" in name for name in decayed) == 4 * 3
    for group in found.values():
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.7), 1e-3)


def test_dense_model_without_norm_weights() -> None:
    found = groups("mula_debug_dense")
    assert [name for name, group in found.items() if group["weight_decay"] == 0] == ["tok_embeddings.weight"]


@pytest.mark.parametrize("flavor", ["mula_debug", "mula_debug_dense"])
def test_decay_all(flavor: str) -> None:
    assert {group["weight_decay"] for group in groups(flavor, decay_all=True).values()} == {0.1}
