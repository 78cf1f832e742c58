"""A stand-in for many gradients in a training loop's clipping: the loop clips it, the optimizer applies its factor."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


class GradNorm(nn.Module):
    """What a training loop's ``clip_grad_norm_`` finds in place of gradients: their norm.

    The gradient of the one parameter is ``(norm, tiny)`` on each rank. The square of ``tiny`` vanishes in float32, so
    the loop computes the right norm over meshes, experts and pipeline stages; and whatever factor it scales gradients
    with can be read exactly from the second element, since ``tiny`` is a power of two.

    Args:
        mesh: of the gradients, or None if they are plain tensors.
        placements: Replicate() on the mesh dimensions whose ranks hold the same norm, Shard(0) where norms are parts.
        device: of the gradients.
    """

    TINY = 2.0**-100

    def __init__(self, mesh: DeviceMesh | None, placements: Sequence[Placement], device: torch.device) -> None:
        super().__init__()
        self._mesh, self._placements = mesh, placements
        self.value = nn.Parameter(self._wrapped(torch.zeros(2, device=device)), requires_grad=False)

    def _load_from_state_dict(self, *_: Any) -> None:
        """No state dict has it."""

    def _wrapped(self, local: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return local
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False)

    def set(self, norm: torch.Tensor) -> None:
        """Show this rank's norm, a float32 scalar, to the loop."""
        self.value.grad = self._wrapped(torch.stack([norm, torch.full_like(norm, self.TINY)]))

    def factor(self) -> torch.Tensor:
        """What the loop has multiplied gradients with, a float32 scalar on the device."""
        grad = self.value.grad
        assert grad is not None
        return (grad.to_local() if isinstance(grad, DTensor) else grad)[1] / self.TINY
