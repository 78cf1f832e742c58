"""The ops as torch sees them: registration, fake outputs, autograd, and the choice of kernels or reference.

`inductor_kernels::moe_experts` and `..._backward` are opaque to the tracer and have static output shapes, so they work
under `torch.compile(fullgraph=True)`, CUDA graphs and activation checkpointing, and never read a value on the host.

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E local experts, R slots,
N elements of the plan.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.resources
import logging
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad

from . import reference
from .configs import layer_config
from .plan import Plan, empty_plan, num_slots, plan_size

Path = Literal["triton", "reference"]

_SOURCES = [f for f in importlib.resources.files(__package__).iterdir() if f.name.endswith(".py")]
_VERSION = zlib.crc32(b"".join(f.read_bytes() for f in sorted(_SOURCES, key=lambda f: f.name)))
"""Of this package's code, an argument of the op. Inductor's caches on disk know an op by its name and arguments alone:
without it, code compiled before a change of the plan would still be found, and expect other shapes."""

_log = logging.getLogger(__name__)
_path_of_device: dict[str, Path] = {}
_forced_path: Path | None = None


@functools.cache
def _kernels() -> ModuleType:
    """layer.py, which imports triton."""
    return importlib.import_module(f"{__package__}.layer")


def kernel_path(device: torch.device) -> Path:
    """The path that ops on `device` take; decided once per device type, with one log line."""
    if _forced_path is not None:
        return _forced_path
    if device.type not in _path_of_device:
        path: Path = "reference"
        reason = "no Triton kernels for this device type"
        if device.type in ("cuda", "xpu"):
            try:
                _kernels()
                path, reason = "triton", "hand-written kernels"
            except ImportError as error:
                reason = f"Triton cannot be imported: {error}"
        _path_of_device[device.type] = path
        _log.info("Kernels on %s: %s path (%s)", device.type, path, reason)
    return _path_of_device[device.type]


@contextlib.contextmanager
def use_path(path: Path) -> Iterator[None]:
    """Force one path inside the block, for tests and A/B timing; a failing kernel then raises, without falling back."""
    global _forced_path
    previous, _forced_path = _forced_path, path
    try:
        yield
    finally:
        _forced_path = previous


def _run(function: str, device: torch.device, *args: Any, overwritten: torch.Tensor | None = None) -> Any:
    """`function` of layer.py, or of reference.py where the kernels are missing or raise.

    Args:
        overwritten: of `args`, what the kernels may destroy. Where they raise after that, the reference can't help.
    """
    if kernel_path(device) == "triton":
        version = None if overwritten is None else overwritten._version
        try:
            with _current(device):
                return getattr(_kernels(), function)(*args)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # after the latter nothing runs on the device
            raise
        except Exception as error:
            if _forced_path is not None:
                raise
            _path_of_device[device.type] = "reference"
            _log.warning("MoE experts on %s: reference path from now on, the kernels raised %r", device.type, error)
            if overwritten is not None and overwritten._version != version:
                error.add_note("This step is lost: kernels before had overwritten what its backward needs.")
                raise
    # Products in the dtype of the inputs, as the kernels', and likewise without a graph.
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        return getattr(reference, function)(*args)


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the one that launches go to; autograd's threads do it by themselves, a forward doesn't."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


# `define` and `impl` instead of `custom_op`, an autograd function of our own instead of `register_autograd`: the checks
# of those cost as much time on the host as a small layer's kernels take.
torch.library.define(
    "inductor_kernels::moe_experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w1, Tensor w3, Tensor w2, int max_rows, bool save,"
    " int version) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "inductor_kernels::moe_experts_backward",
    "(Tensor dout, Tensor x, Tensor weights, Tensor w1, Tensor w3, Tensor w2, Tensor gate_up, Tensor plan)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _row_tile(x_TD: torch.Tensor, w2_EDF: torch.Tensor) -> int:
    # int(): the widths of weights are fixed even where a tracer was told that all sizes are dynamic.
    return layer_config(x_TD.device, x_TD.dtype, int(w2_EDF.shape[1]), int(w2_EDF.shape[2])).row_tile


def _moe_experts(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    max_rows: int,
    save: bool,
    version: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TD, topk_ids_TK, topk_weights_TK = x_TD.contiguous(), topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    w1_EFD, w3_EFD, w2_EDF = w1_EFD.contiguous(), w3_EFD.contiguous(), w2_EDF.contiguous()
    if topk_ids_TK.dtype == torch.uint8:  # has no -1, by which the kernels know picks that aren't there
        topk_ids_TK = topk_ids_TK.int()
    plan = empty_plan(topk_ids_TK, w1_EFD.shape[0], _row_tile(x_TD, w2_EDF), max_rows)
    if plan.T * plan.K == 0:
        reference.build_plan(topk_ids_TK, plan)
        return torch.zeros_like(x_TD), x_TD.new_empty(plan.R if save else 0, 2 * w1_EFD.shape[1]), plan.memory_N
    inputs = (x_TD, topk_ids_TK, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    return *_run("forward", x_TD.device, *inputs, plan, save), plan.memory_N


@torch.library.register_fake("inductor_kernels::moe_experts")
def _(x_TD, topk_ids_TK, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF, max_rows, save, version):
    E, F, _ = w1_EFD.shape
    row_tile = _row_tile(x_TD, w2_EDF)
    R = num_slots(topk_ids_TK.numel(), E, row_tile, max_rows)
    return (
        torch.empty_like(x_TD, memory_format=torch.contiguous_format),
        x_TD.new_empty(R if save else 0, 2 * F),
        topk_ids_TK.new_empty(plan_size(topk_ids_TK.numel(), E, R, row_tile), dtype=torch.int32),
    )


def _moe_experts_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _gradients(False, *inputs)


def _gradients(
    overwrite: bool,
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    plan_N: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    inputs = (dout_TD, x_TD, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    if topk_weights_TK.numel() == 0:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs[1:])
    T, K = topk_weights_TK.shape
    plan = Plan(plan_N, T, K, w1_EFD.shape[0], gate_up_R2F.shape[0], _row_tile(x_TD, w2_EDF))
    args = (*(t.contiguous() for t in inputs), gate_up_R2F, plan, overwrite)
    return _run("backward", x_TD.device, *args, overwritten=gate_up_R2F if overwrite else None)


@torch.library.register_fake("inductor_kernels::moe_experts_backward")
def _(dout_TD, x_TD, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF, gate_up_R2F, plan_N):
    inputs = (x_TD, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs)


class _Experts(torch.autograd.Function):
    """Autograd of outputs that are computed already: what the device shall do is launched before all this."""

    @staticmethod
    def forward(ctx, outputs, x_TD, weights_TK, w1_EFD, w3_EFD, w2_EDF):
        out_TD, gate_up_R2F, plan_N = outputs
        ctx.save_for_backward(x_TD, weights_TK, w1_EFD, w3_EFD, w2_EDF, gate_up_R2F, plan_N)
        # The saved outputs get no gradient: without this, torch would fill one of size R x 2F with zeros.
        ctx.set_materialize_grads(False)
        ctx.overwritten = None
        return out_TD, gate_up_R2F, plan_N

    @staticmethod
    def backward(ctx, dout_TD, *_):
        if torch.is_grad_enabled():  # `once_differentiable` would be silent about a gradient of a gradient by x alone
            raise NotImplementedError("moe_experts has no second derivative: backward without create_graph=True")
        if dout_TD is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        gate_up_R2F = saved[-2]
        if type(gate_up_R2F) is torch.Tensor:
            # Not traced: reuse the memory of the saved pre-activations. A second backward through the same graph then
            # raises torch's "modified by an inplace operation" instead of reading what is no longer there, but not
            # where the user's saved-tensor hooks hand out the same tensor again.
            if ctx.overwritten == (gate_up_R2F.data_ptr(), gate_up_R2F._version):
                raise RuntimeError("a second backward through moe_experts: its saved pre-activations are overwritten")
            grads = _gradients(True, dout_TD, *saved)
            ctx.overwritten = (gate_up_R2F.data_ptr(), gate_up_R2F._version)
        else:
            grads = torch.ops.inductor_kernels.moe_experts_backward(dout_TD, *saved)
        dx_TD, dweights_TK, dw1_EFD, dw3_EFD, dw2_EDF = grads
        return None, dx_TD, dweights_TK, dw1_EFD, dw3_EFD, dw2_EDF


def _with_autograd(x_TD: torch.Tensor, ids_TK: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        outputs = torch.ops.inductor_kernels.moe_experts.default(x_TD, ids_TK, *others)
    differentiable = (x_TD, *others[:4])
    return _Experts.apply(outputs, *differentiable) if _needs_gradient(*differentiable) else outputs


torch.library.impl("inductor_kernels::moe_experts", "default", _moe_experts)
torch.library.impl("inductor_kernels::moe_experts_backward", "default", _moe_experts_backward)
_library = torch.library.Library("inductor_kernels", "FRAGMENT")
_library.impl("moe_experts", _with_autograd, "Autograd")


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


def _is_plain(*tensors: torch.Tensor) -> bool:
    """Nothing that must see the op stands before the device: no tracer, mode, function transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and not tensors[0].is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all([type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors])
    )


_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check(x_TD, ids_TK, weights_TK, w1_EFD, w3_EFD, w2_EDF) -> None:
    E, F, D = w1_EFD.shape if w1_EFD.ndim == 3 else (0, 0, 0)
    if E == 0 or w3_EFD.shape != (E, F, D) or w2_EDF.shape != (E, D, F):
        raise ValueError(
            f"expert weights must be w1 (E, F, D), w3 (E, F, D), w2 (E, D, F), E > 0; got {tuple(w1_EFD.shape)}, "
            f"{tuple(w3_EFD.shape)}, {tuple(w2_EDF.shape)}"
        )
    if x_TD.ndim != 2 or x_TD.shape[1] != D:
        raise ValueError(f"x must be (T, {D}) to match the expert weights, got {tuple(x_TD.shape)}")
    if ids_TK.ndim != 2 or ids_TK.shape[0] != x_TD.shape[0] or weights_TK.shape != ids_TK.shape:
        raise ValueError(
            f"expert ids and routing weights must both be (T, K) with T = {x_TD.shape[0]}, "
            f"got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    dtype = x_TD.dtype
    if not dtype == w1_EFD.dtype == w3_EFD.dtype == w2_EDF.dtype:
        dtypes = sorted({str(t.dtype) for t in (x_TD, w1_EFD, w3_EFD, w2_EDF)})
        raise ValueError(f"x and the expert weights must have one dtype, got {dtypes}: cast x first")
    if ids_TK.dtype not in _ID_DTYPES or not weights_TK.is_floating_point():
        raise ValueError(
            f"expert ids must be signed integers or uint8 and weights floats, got {ids_TK.dtype} and {weights_TK.dtype}"
        )
    if not x_TD.device == ids_TK.device == weights_TK.device == w1_EFD.device == w3_EFD.device == w2_EDF.device:
        devices = sorted({str(t.device) for t in (x_TD, ids_TK, weights_TK, w1_EFD, w3_EFD, w2_EDF)})
        raise ValueError(f"all inputs must be on one device, got {devices}")
    if dtype not in _KERNEL_DTYPES and kernel_path(x_TD.device) == "triton":
        raise ValueError(f"the kernels compute in bfloat16, float16 or float32, not {dtype}: cast x and weights")


def moe_experts(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    max_rows: int | None = None,
) -> torch.Tensor:
    """Routed SwiGLU experts: out[t] = sum_k weights[t, k] * W2_e (silu(W1_e x[t]) * W3_e x[t]) with e = ids[t, k].

    Differentiable in x, the routing weights and the expert weights. Deterministic; no host synchronisation.

    Args:
        x_TD: (T, D) tokens, in the dtype of the expert weights (bf16, fp16 or fp32; sums are fp32).
        topk_ids_TK: (T, K) integer expert ids. An id outside [0, E) isn't local: its pick contributes nothing.
        topk_weights_TK: (T, K) routing weights, any float dtype.
        w1_EFD: (E, F, D) gate projection. w3_EFD: (E, F, D) up projection. w2_EDF: (E, D, F) down projection.
        max_rows: upper bound on the local picks, where the caller knows one below T*K; it bounds the memory of the
            intermediate rows. If there are more, the output rows of the tokens left out are NaN.

    Returns:
        (T, D) in the dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit together, or a negative bound.
        NotImplementedError: forward-mode differentiation, and in backward a second derivative (create_graph).
    """
    _check(x_TD, topk_ids_TK, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"max_rows must not be negative, got {max_rows}; None means no bound")
    tensors = (x_TD, topk_ids_TK, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("moe_experts has no forward-mode derivative")
    save = _needs_gradient(*tensors)
    inputs = (*tensors, -1 if max_rows is None else max_rows, save, _VERSION)
    if not _is_plain(*tensors):
        return torch.ops.inductor_kernels.moe_experts(*inputs)[0]
    # The same past the dispatcher, where a small layer would leave the device waiting for the host.
    outputs = _moe_experts(*inputs)
    return (_Experts.apply(outputs, x_TD, *tensors[2:]) if save else outputs)[0]


def sorted_experts(
    x_RD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
) -> torch.Tensor:
    """SwiGLU experts on rows already sorted by expert, as behind an all-to-all dispatcher; see `moe_experts`.

    Args:
        x_RD: (R, D) rows, those of expert 0 first.
        num_tokens_per_expert_E: (E,) row counts on the same device, of any integer or float dtype. Rows past their sum
            give zero rows and take no part in any gradient.

    Returns:
        (R, D) expert outputs, unweighted, in the dtype of x.
    """
    ends_E = num_tokens_per_expert_E.to(torch.int64).cumsum(0)  # sums of 16-bit floats would be rounded
    rows_R = torch.arange(x_RD.shape[0], device=x_RD.device)
    ids_R1 = torch.searchsorted(ends_E, rows_R, right=True)[:, None]
    ones_R1 = torch.ones(ids_R1.shape, dtype=torch.float32, device=x_RD.device)
    return moe_experts(x_RD, ids_R1, ones_R1, w1_EFD, w3_EFD, w2_EDF)
