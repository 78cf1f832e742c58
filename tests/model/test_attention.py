"""Attention pieces: full-width norm, document mask."""

import torch

from mula_titan.model import model_registry
from mula_titan.model.attention import FullWidthRMSNorm, document_causal_mask


def _model(**changes):
    spec = model_registry("mula_debug", dim=32, ffn_dim=16, n_layers=2, vocab_size=64, init_std=0.2, **changes)
    model = spec.model.build()
    model.init_states()
    return model.eval()


def test_full_width_norm_equals_torch() -> None:
    norm = FullWidthRMSNorm.Config(normalized_shape=24, eps=1e-5, param_init={"weight": lambda p: None}).build()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 24, requires_grad=True)
    want_x = x.detach().clone().requires_grad_()
    out, want = norm(x), torch.nn.functional.rms_norm(want_x, (24,), norm.weight, 1e-5)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    got_grads = torch.autograd.grad(out, [x, norm.weight], grad)
    torch.testing.assert_close(got_grads, torch.autograd.grad(want, [want_x, norm.weight], grad))


def test_document_mask_table() -> None:
    mask = document_causal_mask(torch.tensor([[0, 1, 0, 1, 2]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_packed_documents_equal_separate_ones() -> None:
    model = _model()
    tokens = torch.randint(0, 64, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])
    packed = model(tokens, positions=positions)
    for first, last in ((0, 4), (4, 9), (9, 12)):
        torch.testing.assert_close(packed[:, first:last], model(tokens[:, first:last]), rtol=1e-4, atol=1e-5)


def test_without_the_mask_documents_see_each_other() -> None:
    model = _model(document_mask=False)
    tokens = torch.randint(0, 64, (1, 12))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 64
    assert not torch.allclose(model(tokens)[0, -1], model(changed)[0, -1])
    masked, positions = _model(), torch.tensor([[0, 1, 2, 3] * 3])
    torch.testing.assert_close(
        masked(tokens, positions=positions)[0, -1], masked(changed, positions=positions)[0, -1], rtol=0, atol=0
    )


def test_a_token_never_sees_later_ones() -> None:
    model = _model()
    tokens = torch.randint(0, 64, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 64
    for positions in (None, torch.arange(12)[None]):
        a, b = model(tokens, positions=positions), model(changed, positions=positions)
        assert torch.equal(a[:, :7], b[:, :7])
        assert not torch.equal(a[:, 7], b[:, 7])
