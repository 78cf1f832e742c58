"""Work that one rank does for all, and whose failure all must see."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0; every rank gets its result, or raises what it raised. A collective call.

    Args:
        function: result and exception must pickle.
    """
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (OSError, ValueError) as error:
            outcome[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
