"""What xccl refuses or gets wrong, refused on any backend: averages, pre-multiplied sums, uneven or empty all-to-all.

Sources: reference faults A2, A3 (reductions) and A12 (all-to-all).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

ALLOWED_REDUCTIONS = {"SUM", "MAX", "MIN"}


class XpuRules(TorchDispatchMode):
    """Raises at the first collective that breaks a rule; ``seen`` counts the collectives that kept them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.seen[name] = self.seen.get(name, 0) + 1
            for value in [*args, *(kwargs or {}).values()]:
                self._check(name, value)
            if "all_to_all" in name or "alltoall" in name:
                self._check_all_to_all(name, args)
        return func(*args, **(kwargs or {}))

    def _check(self, name: str, value: Any) -> None:
        reduction = None
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            reduction = dist.ReduceOp.RedOpType(value.op()).name
        elif isinstance(value, str) and value.upper() in {"SUM", "AVG", "PREMUL_SUM", "MAX", "MIN", "PRODUCT"}:
            reduction = value
        if reduction is None:
            return
        kind = reduction.upper()
        if kind not in ALLOWED_REDUCTIONS:
            raise RuntimeError(f"{name} reduces with {kind}, which xccl refuses")

    def _check_all_to_all(self, name: str, args: Any) -> None:
        for value in args:
            if isinstance(value, list) and value and all(isinstance(n, int) for n in value):
                if len(set(value)) > 1:
                    raise RuntimeError(f"{name} with uneven splits {value}")
                if value[0] == 0:
                    raise RuntimeError(f"{name} with empty messages")
