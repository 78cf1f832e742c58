"""The torchtitan modules on the kernels: equal to the stock ones, by config type and as override in Qwen3 MoE."""

from __future__ import annotations

import pytest
import torch
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.qwen3 import model_registry

from mula_titan.components.experts import KernelGroupedExperts, KernelRoutedExperts, TokenMajorDispatcher

E, D, F, K = 4, 16, 24, 2
FACTORIES = "mula_titan.components.experts."


def fill(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


class Float32GroupedExperts(GroupedExperts):
    """Oracle of the stock module without its cast to bf16: per-expert slices."""

    def forward(self, x_RD, num_tokens_per_expert_E):
        silu = torch.nn.functional.silu
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat(
            [(silu(r @ self.w1_EFD[e].T) * (r @ self.w3_EFD[e].T)) @ self.w2_EDF[e].T for e, r in enumerate(rows)]
        )


def build(kind: type, experts_kind: type, dispatcher=None) -> RoutedExperts:
    module = kind.Config(
        inner_experts=experts_kind.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=dispatcher or LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    ).build()
    fill(module)
    return module


def run(module: RoutedExperts, x_BLD, scores_BLK, ids_BLK) -> list[torch.Tensor]:
    inputs = [x_BLD.clone().requires_grad_(), scores_BLK.clone().requires_grad_()]
    counts_E = torch.bincount(ids_BLK.flatten(), minlength=E)
    out_BLD = module(*inputs, ids_BLK, counts_E)
    return [out_BLD, *torch.autograd.grad(out_BLD.square().sum(), [*inputs, *module.parameters()])]


@pytest.fixture
def routing():
    x_BLD = torch.randn(2, 10, D)
    scores_BLE = torch.rand(2, 10, E)
    scores_BLE[..., 3] = -1.0  # one expert gets nothing
    scores_BLK, ids_BLK = scores_BLE.topk(K)
    return x_BLD, scores_BLK, ids_BLK


def test_routed_experts_equal_stock_dispatch(routing):
    stock = build(RoutedExperts, GroupedExperts)
    stock.inner_experts.__class__ = Float32GroupedExperts
    ours = build(KernelRoutedExperts, KernelGroupedExperts)
    for value, truth in zip(run(ours, *routing), run(stock, *routing), strict=True):
        assert (value - truth).norm() < 2e-6 * truth.norm()


def test_grouped_experts_behind_stock_dispatch(routing):
    stock = build(RoutedExperts, GroupedExperts)
    stock.inner_experts.__class__ = Float32GroupedExperts
    ours = build(RoutedExperts, KernelGroupedExperts)
    for value, truth in zip(run(ours, *routing), run(stock, *routing), strict=True):
        assert (value - truth).norm() < 2e-6 * truth.norm()


def test_bf16_parameters_give_the_stock_numbers(routing):
    """Where the stock module's bf16 is what the parameters are, both agree to bf16 rounding."""
    x_BLD, scores_BLK, ids_BLK = routing
    stock, ours = (
        build(RoutedExperts, GroupedExperts).bfloat16(),
        build(KernelRoutedExperts, KernelGroupedExperts).bfloat16(),
    )
    values, truths = (run(m, x_BLD.bfloat16(), scores_BLK, ids_BLK) for m in (ours, stock))
    for value, truth in zip(values, truths, strict=True):
        assert value.dtype == truth.dtype
        assert (value.float() - truth.float()).norm() / truth.float().norm() < 1.5e-2


def test_token_major_dispatcher_splits_experts(routing):
    """Two halves of the experts, each seeing all tokens with ids relative to its first expert, add up to the whole."""

    class HalfDispatcher(LocalTokenDispatcher):
        first = 0

        def gather(self, x_TD, scores_TK, ids_TK):
            return x_TD, scores_TK, ids_TK - self.first

        def reduce(self, out_TD):
            return out_TD

    whole = build(KernelRoutedExperts, KernelGroupedExperts)
    halves = []
    for first in (0, E // 2):
        half = build(KernelRoutedExperts, KernelGroupedExperts)
        half.token_dispatcher.__class__ = HalfDispatcher
        half.token_dispatcher.first = first
        assert isinstance(half.token_dispatcher, TokenMajorDispatcher)
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            weight = getattr(whole.inner_experts, name).detach()[first : first + E // 2].clone()
            setattr(half.inner_experts, name, torch.nn.Parameter(weight))
        halves.append(run(half, *routing))
    truth = whole(*routing, None)
    torch.testing.assert_close(halves[0][0] + halves[1][0], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [("kernel_grouped_experts", KernelGroupedExperts), ("kernel_routed_experts", KernelRoutedExperts)],
)
def test_override_in_torchtitans_qwen3(factory, kind):
    def build_model(imports: list[str]):
        spec = model_registry("debugmodel_moe")
        spec.model.layers = spec.model.layers[:1]
        apply_overrides(OverrideConfig(imports=imports), spec.model)
        moe = spec.model.layers[0].moe.build()
        fill(moe)
        return moe

    stock, ours = build_model([]), build_model([FACTORIES + factory])
    replaced = [m for m in ours.modules() if type(m) is kind]
    assert len(replaced) == 1 and not any(type(m) is kind for m in stock.modules())
    assert set(stock.state_dict()) == set(ours.state_dict())
    dim = stock.routed_experts.inner_experts.w1_EFD.shape[2]
    x_BLD = torch.randn(1, 12, dim)
    stock_out, our_out = stock(x_BLD), ours(x_BLD)
    # The stock module computes in bf16 whatever the parameters are.
    assert 0 < (our_out - stock_out).norm() / stock_out.norm() < 1.5e-2
