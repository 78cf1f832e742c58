"""Device selection: XPU (xccl), CUDA (nccl) or CPU (gloo).

torchtitan 0.3.0 fixes ``device_type`` and ``device_module`` when ``torchtitan.tools.utils`` is imported and copies them
by name into other modules. It has no CPU entry: on a CPU host it says "cuda". :func:`select_device` puts a CPU device
module and CPU answers in the places that ask for an accelerator.
"""

import os
import resource
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

DEVICE_VARIABLE = "MULA_TITAN_DEVICE"
"""Environment variable that forces a device type: ``xpu``, ``cuda`` or ``cpu``."""

BACKENDS = {"xpu": "xccl", "cuda": "nccl", "cpu": "gloo"}
"""Collective backend per device type."""


class CpuDeviceModule:
    """The part of ``torch.cuda``'s interface that torchtitan calls, answered for a CPU host."""

    @staticmethod
    def set_device(device: Any) -> None:
        """A process has one CPU device; nothing to set."""

    @staticmethod
    def device_count() -> int:
        """One device a process: torchtitan then uses index 0 for every rank."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Index of the device in use."""
        return 0

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """CPU kernels are synchronous."""

    @staticmethod
    def empty_cache() -> None:
        """There is no caching allocator to empty."""

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """The kernel keeps the peak resident size for the life of the process."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Model name of the CPU."""
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
        except (OSError, StopIteration):
            return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        """Total memory of the host in bytes."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """Peak resident size of this process in bytes, under the caching allocator's names."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def measured_cpu_flops(size: int = 512, repeats: int = 3) -> float:
    """FLOP/s of an fp32 ``size``-cubed matrix product on this process's threads: the peak of MFU on a CPU."""
    a = torch.rand(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _set_pg_timeouts_cpu(timeout: timedelta, parallel_dims: Any) -> None:
    """CPU version of ``torchtitan.distributed.utils.set_pg_timeouts``: gloo's barrier takes no ``device_ids``."""
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.set_timeout(timeout, group)


def select_device() -> str:
    """Choose the device type and make torchtitan use it. Idempotent.

    Returns:
        ``"xpu"``, ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: ``MULA_TITAN_DEVICE`` names an unknown device type or one that this host lacks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator is not None else "cpu"
    device_type = os.environ.get(DEVICE_VARIABLE, found)
    if device_type not in BACKENDS:
        raise ValueError(f"{DEVICE_VARIABLE}={device_type!r}: expected one of {', '.join(BACKENDS)}.")
    if device_type not in (found, "cpu"):
        raise ValueError(
            f"{DEVICE_VARIABLE}={device_type!r}, but this host has {found!r}. "
            f"Unset {DEVICE_VARIABLE}, or install the torch build for {device_type!r}."
        )
    if device_type != "cpu":
        return device_type

    import torchtitan.distributed.utils as titan_dist_utils
    import torchtitan.tools.utils as titan_utils

    titan_dist_utils.set_pg_timeouts = _set_pg_timeouts_cpu
    titan_utils.get_peak_flops = lambda device_name: measured_cpu_flops()
    # torchtitan's modules copy these two names from tools.utils when they are imported; later imports copy ours.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type = "cpu"  # type: ignore[attr-defined]
            if hasattr(module, "device_module"):
                module.device_module = CpuDeviceModule  # type: ignore[attr-defined]
    return "cpu"
