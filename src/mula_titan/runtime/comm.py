"""Collectives that every backend accepts."""

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def use_plain_sums(model: nn.Module) -> None:
    """Make FSDP2 reduce gradients with plain SUM.

    With a divide factor other than the group size FSDP2 asks for PREMUL_SUM, which gloo and xccl refuse. Gradients here
    are sums (the loss is already divided by the global token count), so SUM is exact.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
