"""What differs between XPU, CUDA and CPU: device choice and collectives. All patches of torchtitan live here."""

from mula_titan.runtime.device import select_device

__all__ = ["select_device"]
