"""A run's start: one line if the planner knows that its layout won't fit the device."""

from typing import Any

import torch

from mula_titan.planner.layout import Layout
from mula_titan.planner.memory import MemoryModel
from mula_titan.runtime import select_device


def too_large(config: Any, world_size: int, device_type: str, total_bytes: float) -> str | None:
    """What to tell the user if the worst rank needs more than the device has; None if it fits, or isn't known.

    Takes a second or two, without process groups.

    Args:
        config: a validated ``MulaTrainer.Config``.
        world_size: ranks of the job.
        device_type: ``cuda``, ``xpu`` or ``cpu``.
        total_bytes: memory of a rank's device.
    """
    try:
        layout = Layout.from_config(config, world_size, device_type)
        worst = MemoryModel(config, device_type=device_type).worst(layout)
    except ValueError:  # a schedule that the planner doesn't know
        return None
    if worst.peak <= total_bytes:
        return None
    kinds = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in worst.kinds().items())
    return (
        f"This layout ({layout.described()}) needs about {worst.peak / 1e9:.0f} GB on a rank of pipeline stage "
        f"{worst.pp_rank}, and the device has {total_bytes / 1e9:.0f} GB ({kinds}). "
        f"mula-titan plan --world-size {world_size} --search finds layouts that fit."
    )


def device_memory_warning(config: Any, world_size: int) -> str | None:
    """:func:`too_large` for this process's device; None on a CPU."""
    device_type = select_device()
    if device_type == "cpu":
        return None
    properties = torch.get_device_module(device_type).get_device_properties(0)
    return too_large(config, world_size, device_type, properties.total_memory)
