"""Start ranks once (gloo, or NCCL and xccl where there are devices), run many cases on them, bring results back."""

import faulthandler
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)
"""A rank that raises leaves the others waiting in a collective; they give up after this."""

Case = tuple[str, Any]
"""Name and argument of one case."""


def _rank_main(
    rank: int, world: int, port: int, function: Callable[[Any], Any], cases: list[Case], folder: str
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    faulthandler.enable()
    torch.set_num_threads(1)
    from mula_titan.runtime.device import BACKENDS, select_device
    from mula_titan.runtime.logs import set_up_logging

    set_up_logging()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed does
    device_type = select_device()
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
    store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
    dist.init_process_group(BACKENDS[device_type], store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    for name, argument in cases:
        try:
            result = function(argument)
        except Exception:
            result = traceback.format_exc()
        torch.save(result, Path(folder) / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(world: int, function: Callable[[Any], Any], cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    """Run ``function(argument)`` for every case on ``world`` ranks that are started once.

    Returns:
        Results by case, a list over ranks. A rank whose function raised gives the traceback as a string.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # takes a free port and holds it
    arguments = (world, store.port, function, cases, str(folder))
    death = "the ranks ended before this case"
    # torch and torchtitan are imported once, in the server that the ranks are forked from.
    mp.set_forkserver_preload([function.__module__])
    try:
        mp.start_processes(_rank_main, args=arguments, nprocs=world, start_method="forkserver")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        death = f"{death}: {error}"

    def result(name: str, rank: int) -> Any:
        path = folder / f"{name}.{rank}.pt"
        return torch.load(path, weights_only=False) if path.exists() else death

    return {name: [result(name, rank) for rank in range(world)] for name, _ in cases}
