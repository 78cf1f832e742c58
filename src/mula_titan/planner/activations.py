"""What a block, and the head with the loss, keep for the backward, and their peaks: counted, not estimated.

The real modules with the real activation checkpointing run forward and backward on fake tensors, which have sizes but
no values, while a dispatch mode follows the life of every storage. This is exact for eager execution. Three things
differ on a device: expert kernels use scratch memory inside one op (added by :func:`kernel_scratch`), segments of
experts are padded to the device's row tile (:func:`padding_bytes`), and ``torch.compile`` saves less than eager does.

Shape suffixes: B = batch, L = sequence length, D = width, T = tokens, K = experts per token, E = experts.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from inductor_kernels.plan import num_slots
from mula_titan.components.token_dispatcher import AllGatherTokenDispatcher
from mula_titan.model.spec import model_config
from mula_titan.planner.layout import Layout

ROW_TILES = {"cpu": 16, "cuda": 128, "xpu": 128}
"""Rows to which expert segments are padded, by device type: ``inductor_kernels.configs``, bf16."""
GATHERED_COPY = 320 * 2**20
"""Largest gathered copy alive beside the weight gradients, bytes: ``inductor_kernels.layer``."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside this mode have made and that are still alive.

    Bytes that non-matrix operations read and write are added up too, for the time model.
    """

    MATRIX = ("mm", "addmm", "bmm", "_scaled_dot_product", "_grouped_mm", "moe_experts", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.moved = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._finalizers: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                made += self._follow(tensor.untyped_storage(), args)
        if made and not any(word in func.__name__ for word in self.MATRIX):
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.moved += made + sum(t.numel() * t.itemsize for t in inputs)
        return result

    def ignore(self, tensors: Any) -> None:
        """Storages that were there before."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = 0

    def restart_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.live

    def _follow(self, storage: torch.UntypedStorage, args: Any) -> int:
        if storage in self._known:
            return 0
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)
        return size

    def _release(self, size: int) -> None:
        self.live -= size


@dataclass(frozen=True)
class Cost:
    """Bytes of one module for one micro-batch."""

    held: float
    """From forward to backward, its output included."""
    forward_peak: float
    """During its forward, its own part."""
    backward_peak: float
    """During its backward, what it holds included."""
    moved: float
    """Read and written by operations other than matrix products, forward and backward, uncompiled."""


def trace(run: Callable[[], Any], params: list[nn.Parameter], before: list[torch.Tensor]) -> Cost:
    """Run a forward that returns a tensor, and its backward, on fake tensors; parameter gradients are dropped at once.

    Args:
        run: the forward.
        params: parameters, whose gradients the optimizer's hooks take away.
        before: tensors that exist anyway: parameters, buffers, inputs.
    """

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in params]
    mode = LiveBytes()
    mode.ignore([*params, *before])
    with mode:
        out = run()
        held, forward_peak = mode.live, mode.peak
        mode.restart_peak()
        # The gradient of the output is made here; with the head the loss is a scalar.
        torch.autograd.backward(out, torch.ones_like(out))
    for handle in handles:
        handle.remove()
    return Cost(held=held, forward_peak=forward_peak, backward_peak=mode.peak, moved=mode.moved)


# -- dispatch without ranks -------------------------------------------------------------------------------------------


class _Resize(torch.autograd.Function):
    """Other rows, as a collective would return them; saves nothing, as the collectives do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:  # type: ignore[override]
        ctx.rows = x.shape[0]
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.new_empty(ctx.rows, *grad.shape[1:]), None


class _Ranks:
    """In place of a mesh: a size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> None:
        return None


class _Gathered(AllGatherTokenDispatcher):
    """The all-gather dispatcher with collectives that only have sizes."""

    def gather(self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> Any:
        rows = x_TD.shape[0] * self.ep_mesh.size()  # type: ignore[union-attr]
        return _Resize.apply(x_TD, rows), _Resize.apply(scores_TK, rows), ids_TK.new_empty(rows, ids_TK.shape[1])

    def reduce(self, out_GD: torch.Tensor) -> torch.Tensor:
        return _Resize.apply(out_GD, out_GD.shape[0] // self.ep_mesh.size())  # type: ignore[union-attr]


class _Exchanged(AllToAllTokenDispatcher):
    """The all-to-all dispatcher with collectives that only have sizes; this rank receives ``rows``."""

    rows = 0

    def _token_count_exchange(self, num_local_tokens_per_expert_E: torch.Tensor, pg: Any, ep_size: int) -> torch.Tensor:
        return num_local_tokens_per_expert_E.view(ep_size, -1)

    def _sync_token_count_exchange(self, local_E: torch.Tensor, by_rank: torch.Tensor, ep_size: int) -> Any:
        return by_rank.reshape(-1), [], []

    def _dispatch_token_exchange(self, routed_input_ND: torch.Tensor, pg: Any, *_: Any) -> torch.Tensor:
        self._sent = routed_input_ND.shape[0]
        return _Resize.apply(routed_input_ND, self.rows)

    def _combine_token_exchange(self, routed_output_RD: torch.Tensor, pg: Any, *_: Any) -> torch.Tensor:
        return _Resize.apply(routed_output_RD, self._sent)


# -- modules ----------------------------------------------------------------------------------------------------------


class Activations:
    """Costs of a model's parts for micro-batches of given size; each is counted once and kept."""

    def __init__(self, config: Any, *, device_type: str, imbalance: float = 1.0) -> None:
        """Costs for a configuration.

        Args:
            config: a ``MulaTrainer.Config``; its model, dtype and loss are used.
            device_type: ``cuda``, ``xpu`` or ``cpu``: the padding of expert segments.
            imbalance: rows of the busiest expert rank over the mean (all-to-all dispatch).
        """
        self._config, self._device, self._imbalance = config, device_type, imbalance
        self._blocks: dict[Any, Cost] = {}
        self._heads: dict[Any, Cost] = {}

    def block(self, layout: Layout) -> Cost:
        """One transformer block, forward and backward.

        Tensor parallelism isn't traced: with sequence parallelism all sizes are divided by its degree (Korthikanti et
        al., arXiv 2205.05198, eq. 4); without it nothing is (an upper bound).
        """
        tokens = layout.tokens
        key = (tokens, layout.micro_batch, layout.ep, layout.ac, layout.dispatch, layout.param_dtype)
        if key not in self._blocks:
            self._blocks[key] = self._trace_block(layout)
        cost = self._blocks[key]
        divisor = layout.tp if layout.sequence_parallel or layout.ep > 1 else 1
        return cost if divisor == 1 else Cost(*(value / divisor for value in vars(cost).values()))

    def head(self, layout: Layout) -> Cost:
        """Final norm, output head and loss, in the loss's chunks; the head's tokens are whole on tensor ranks."""
        key = (layout.tokens, layout.micro_batch, layout.loss_chunks, layout.tp, layout.param_dtype)
        if key not in self._heads:
            self._heads[key] = self._trace_head(layout)
        return self._heads[key]

    def _tree(self, layout: Layout, **changes: Any) -> Any:
        tree = model_config(replace(self._config.model, n_layers=1, **changes))
        dist_utils.set_spmd_backend("partial_dtensor")
        return tree

    def _trace_block(self, layout: Layout) -> Cost:
        args, dtype = layout.args, getattr(torch, layout.param_dtype)
        tree = self._tree(layout, expert_dispatch=layout.dispatch)
        experts = tree.layers[0].moe
        if experts is not None:
            experts.routed_experts.inner_experts.num_experts = args.num_experts // layout.ep
        with FakeTensorMode():
            model: Any = _in_dtype(tree.build(), dtype)
            if experts is not None and layout.ep > 1:
                self._stand_in(model.layers["0"].moe.routed_experts, layout)
            ac = layout.applied_to(self._config).activation_checkpoint
            if ac is not None:
                ac.build(dump_folder="").apply(model)
            block = model.layers["0"]
            B, L = layout.micro_batch, layout.seq_len // layout.cp
            x_BLD = torch.empty(B, L, args.dim, dtype=dtype, requires_grad=True)
            weights_BL = torch.empty(B, L, dtype=torch.float32)
            positions_BL = torch.empty(B, L, dtype=torch.int64)
            mask = (
                torch.empty(B, 1, L, L, dtype=torch.bool) if args.document_mask and args.attention == "sdpa" else None
            )
            before = [x_BLD, weights_BL, positions_BL, *([mask] if mask is not None else []), *model.buffers()]
            params = list(block.parameters())
            cost = trace(lambda: block(x_BLD, mask, positions_BL, weights_BL)[0], params, before)
        if experts is None:
            return cost
        held, scratch = self.kernel_extra(layout)
        held = held if layout.ac == "none" or layout.ac == "selective" else 0.0
        return Cost(
            held=cost.held + held,
            forward_peak=cost.forward_peak + held + scratch,
            backward_peak=cost.backward_peak + self.kernel_extra(layout)[0] + scratch,
            moved=cost.moved,
        )

    def _stand_in(self, routed_experts: Any, layout: Layout) -> None:
        dispatcher = routed_experts.token_dispatcher
        dispatcher.__class__ = _Gathered if layout.dispatch == "all_gather" else _Exchanged
        dispatcher.ep_mesh = _Ranks(layout.ep)
        dispatcher.rows = int(layout.tokens * layout.args.top_k * self._imbalance)

    def kernel_extra(self, layout: Layout) -> tuple[float, float]:
        """(padding that stays, scratch that one op uses), bytes, of the expert kernels on the device."""
        return padding_bytes(layout, self._device), kernel_scratch(layout, self._device, self._imbalance)

    def _trace_head(self, layout: Layout) -> Cost:
        args, dtype = layout.args, getattr(torch, layout.param_dtype)
        with FakeTensorMode():
            model: Any = _in_dtype(self._tree(layout).build(), dtype)
            if layout.tp > 1:  # each rank has a part of the vocabulary
                model.lm_head.weight = nn.Parameter(torch.empty(args.vocab_size // layout.tp, args.dim, dtype=dtype))
            loss = self._config.loss.build(compile_config=replace(self._config.compile, enable=False))
            B, L = layout.micro_batch, layout.seq_len // layout.cp
            x_BLD = torch.empty(B, L, args.dim, dtype=dtype, requires_grad=True)
            labels_BL = torch.empty(B, L, dtype=torch.int64)
            valid = torch.ones((), dtype=torch.float32)
            chunked = isinstance(loss, ChunkedLossWrapper)
            if chunked:
                loss.set_lm_head(model.lm_head)

            def run() -> torch.Tensor:
                hidden = model.norm(x_BLD)
                return loss(hidden if chunked else model.lm_head(hidden), labels_BL, valid)[0]

            params = [*model.norm.parameters(), *model.lm_head.parameters()]
            return trace(run, params, [x_BLD, labels_BL, valid])


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Module.to() cannot swap fake parameters.
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=dtype))
    return model


def expert_rows(layout: Layout, row_tile: int, imbalance: float = 1.0) -> int:
    """Rows that the expert kernels allocate for: all picks that this rank might get, padded."""
    tokens = layout.tokens // (layout.tp if layout.ep > 1 else 1)
    picks = tokens * layout.args.top_k
    if layout.ep > 1:
        picks = picks * layout.ep if layout.dispatch == "all_gather" else int(picks * imbalance)
    return num_slots(picks, layout.args.num_experts // layout.ep, row_tile, -1)


def padding_bytes(layout: Layout, device_type: str) -> float:
    """What the saved pre-activations grow by because the device pads expert segments further than a CPU."""
    size = torch.empty((), dtype=getattr(torch, layout.param_dtype)).itemsize
    rows = expert_rows(layout, ROW_TILES[device_type]) - expert_rows(layout, ROW_TILES["cpu"])
    return rows * (2 * layout.args.ffn_dim * size + 4)


def kernel_scratch(layout: Layout, device_type: str, imbalance: float = 1.0) -> float:
    """Scratch inside the expert ops, bytes: what their outputs and saved tensors don't show.

    ``inductor_kernels.layer``: forward, hidden rows and output rows before they are combined; backward, the gradient of
    hidden rows and a gathered copy of the output's gradient while two weight gradients aren't there yet, or later a
    bounded gathered copy beside all three. Held against measured peaks in tests/planner/test_activations.py.
    """
    if device_type == "cpu":
        return 0.0
    args, size = layout.args, torch.empty((), dtype=getattr(torch, layout.param_dtype)).itemsize
    rows = expert_rows(layout, ROW_TILES[device_type], imbalance)
    weight = args.num_experts // layout.ep * args.ffn_dim * args.dim * size
    row_tensors = rows * (args.ffn_dim + args.dim) * size
    return max(row_tensors - 2 * weight, min(rows * args.dim * size, GATHERED_COPY))
