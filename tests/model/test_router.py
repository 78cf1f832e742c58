"""Router, balancing losses and counters."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from mula_titan.components.activation_checkpoint import FullAC, SelectiveAC
from mula_titan.components.load_balance import update_expert_bias
from mula_titan.model import MulaModel, model_registry
from mula_titan.model.moe import Router

E, K, L = 6, 2, 2
SMALL = {"dim": 16, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 8, "n_layers": L, "vocab_size": 32, "init_std": 0.5}
LOSSES = {"load_balance_loss": 0.7, "router_z_loss": 0.3}


def _model(**changes) -> MulaModel:
    model = model_registry("mula_debug", **{**SMALL, "num_experts": E, "top_k": K, **changes}).model.build()
    model.init_states()
    return model.train()


def _batch(tokens_with_padding: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 32, (3, 8))
    weights = torch.full((3, 8), 1 / 24)
    if tokens_with_padding:
        weights[1, 5:] = 0
        weights = weights / weights.sum()
    return tokens, weights


def _router_gradients(model: MulaModel, tokens: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Gradients that come from the router losses alone: the language-model loss is multiplied by 0."""
    model.zero_grad()
    (model(tokens, token_weights=weights) * 0.0).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _logits(model: MulaModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Router logits of each layer, with gradient."""
    found: list[torch.Tensor] = []
    handles = [b.moe.router.gate.register_forward_hook(lambda m, i, o: found.append(o)) for b in model.layers.values()]
    model(tokens, token_weights=torch.ones(tokens.shape))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
def test_router_losses_equal_the_formulas(per_layer: bool, padding: bool) -> None:
    model = _model(load_balance_per_layer=per_layer, **LOSSES)
    tokens, weights = _batch(padding)
    got = _router_gradients(model, tokens, weights)

    logits = [x.flatten(0, 1) for x in _logits(model, tokens)]
    mask = (weights > 0).int()
    groups = [[x] for x in logits] if per_layer else [logits]
    balance = sum(load_balancing_loss_func(tuple(g), E, K, mask) for g in groups) / len(groups)
    z = sum((torch.logsumexp(x, -1) ** 2)[mask.flatten() > 0].mean() for x in logits) / L
    model.zero_grad()
    (0.7 * balance + 0.3 * z).backward()
    want = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert any(float(w.norm()) > 1e-3 for w in want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


def test_losses_of_micro_batches_add_up_to_weighted_means() -> None:
    model = _model(**LOSSES)
    (a, wa), (b, wb) = _batch(), _batch()
    separate = [_router_gradients(model, t, w) for t, w in ((a, wa), (b, wb))]
    weighted = [_router_gradients(model, t, w) for t, w in ((a, wa * 0.25), (b, wb * 0.75))]
    for (ga, gb), (ha, hb) in zip(zip(*separate, strict=True), zip(*weighted, strict=True), strict=True):
        torch.testing.assert_close(ha + hb, 0.25 * ga + 0.75 * gb, rtol=1e-4, atol=1e-7)


def test_a_balanced_router_gives_k() -> None:
    from mula_titan.model.model import router_losses

    share = torch.full((L, E), K / E)
    probs = torch.full((L, E), 1 / E)
    means = {"probs_LE": probs, "share_LE": share, "z_L": torch.zeros(L), "num_layers": L}
    for per_layer in (False, True):
        loss = router_losses(**means, load_balance=1.0, per_layer=per_layer, z=0.0)
        assert float(loss) == pytest.approx(K)


def test_counters_see_each_valid_token_once() -> None:
    model = _model(**LOSSES)
    for index in list(model.layers):  # recomputation runs the router a second time
        model.layers.register_module(index, checkpoint_wrapper(model.layers[index]))
    tokens, weights = _batch(tokens_with_padding=True)
    model(tokens, token_weights=weights).sum().backward()
    for block in model.layers.values():
        assert int(block.moe.tokens_per_expert_E.sum()) == 21 * K
    model.eval()
    model(tokens)
    model.train()
    assert int(model.layers["0"].moe.tokens_per_expert_E.sum()) == 21 * K


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_recomputation_never_routes_anew(policy: type) -> None:
    """All scores tie, and recomputed ones differ by rounding noise: another choice would give other gradients."""
    tokens, weights = _batch()

    def gradients(checkpointed: bool) -> tuple[list[torch.Tensor], int]:
        model = _model(**LOSSES)
        generator = torch.Generator().manual_seed(0)
        calls = 0

        def noise(module, inputs, output):
            nonlocal calls
            calls += 1
            return output + 1e-6 * torch.randn(output.shape, generator=generator)

        for block in model.layers.values():
            torch.nn.init.zeros_(block.moe.router.gate.weight)
            block.moe.router.gate.register_forward_hook(noise)
        if checkpointed:
            policy.Config().build().apply(model)
        model(tokens, token_weights=weights).square().sum().backward()
        return [p.grad for p in model.parameters()], calls

    (want, once), (got, twice) = gradients(False), gradients(True)
    assert (once, twice) == (L, 2 * L)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-4)


def test_route_norm_and_bias_choice() -> None:
    gate = {"gate": _gate()}
    plain = Router.Config(num_experts=E, top_k=K, score_func="softmax", **gate).build()
    normed = Router.Config(num_experts=E, top_k=K, score_func="softmax", route_norm=True, **gate).build()
    for router in (plain, normed):
        router.gate.weight.data = torch.randn(E, 16, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 16)
    probs = F.softmax(x @ plain.gate.weight.T, -1)
    scores, ids, _ = plain(x)
    want_scores, want_ids = probs.topk(K)
    assert torch.equal(ids.sort(-1).values, want_ids.sort(-1).values)
    torch.testing.assert_close(scores.sort(-1).values, want_scores.sort(-1).values)
    torch.testing.assert_close(normed(x)[0].sum(-1), torch.ones(2, 5))
    bias = torch.zeros(E)
    bias[3] = 10.0  # always chosen, but weighted with its own probability
    scores, ids, _ = plain(x, bias)
    assert (ids == 3).any(-1).all()
    torch.testing.assert_close(scores, probs.gather(-1, ids))


def _gate():
    from mula_titan.model.moe import Float32Linear

    return Float32Linear.Config(in_features=16, out_features=E, param_init={"weight": lambda p: None})


def test_bias_moves_towards_balance_and_stays_centred() -> None:
    moe = _model(expert_bias_rate=0.01).layers["0"].moe
    counts = torch.tensor([[10.0, 0.0, 4.0, 4.0, 4.0, 2.0]])
    update_expert_bias([moe], counts)
    assert moe.expert_bias_E[1] > 0 > moe.expert_bias_E[0]
    for _ in range(1000):
        update_expert_bias([moe], counts)
    assert abs(float(moe.expert_bias_E.mean())) < 1e-5


def test_layers_without_bias_do_not_stop_the_others() -> None:
    moes = [_model(expert_bias_rate=rate).layers["0"].moe for rate in (0.0, 0.01)]
    update_expert_bias(moes, torch.tensor([[5.0, 1, 1, 1, 1, 1]] * 2))
    assert moes[0].expert_bias_E is None
    assert float(moes[1].expert_bias_E.abs().max()) > 0


def test_training_without_token_weights_is_refused() -> None:
    model = _model(**LOSSES)
    with pytest.raises(ValueError, match="MulaTrainer"):
        model(_batch()[0])
    assert model.eval()(_batch()[0]).shape == (3, 8, 32)
    assert _model(load_balance_loss=0.0)(_batch()[0]).shape == (3, 8, 32)


def test_forced_balance_gives_every_expert_the_same() -> None:
    model = _model(load_balance_loss=0.0)
    for block in model.layers.values():
        block.moe.router._debug_force_load_balance = True
    model(torch.randint(0, 32, (3, 8)))
    assert model.layers["0"].moe.tokens_per_expert_E.tolist() == [8.0] * E
