"""Starting the ranks: torchrun on one node, and restarts over the good nodes of an allocation.

One node: :func:`run_ranks` hands signals on to the ranks and gives their exit code. All nodes: :func:`launch` checks
them, starts training on enough good ones, and starts again without the bad ones when that can help.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from mula_titan.components.bad_nodes import BAD_NODES, HOST_VARIABLE, read_bad_nodes
from mula_titan.exit_codes import CONFIG, HANG, HARDWARE, NUMERICS, PREFLIGHT, REPLICAS, REQUEUE, STORAGE

FINAL = (0, CONFIG, STORAGE, REQUEUE, NUMERICS, REPLICAS)
"""Exit codes after which a restart in the same allocation is pointless."""

_BY_WEIGHT = (HARDWARE, NUMERICS, HANG, STORAGE, REPLICAS, CONFIG, PREFLIGHT, REQUEUE)


def overall_code(codes: list[int]) -> int:
    """One exit code for several processes: the weightiest of ours, else the first that isn't zero."""
    for code in _BY_WEIGHT:
        if code in codes:
            return code
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _children() -> list[int]:
    """Direct child processes of this one."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        if int(fields[1]) == os.getpid():
            pids.append(int(path.parent.name))
    return pids


def _hand_on(number: int, frame: FrameType | None) -> None:
    for pid in _children():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def run_ranks(arguments: list[str], *, nproc: int, nnodes: str, rdzv_endpoint: str) -> int:
    """torchrun on this node; SIGTERM and SIGUSR1 reach the ranks, who save and end.

    Args:
        arguments: ``-m MODULE ARGUMENT...``.
        nproc: ranks on this node.
        nnodes: nodes, or MIN:MAX.
        rdzv_endpoint: host:port where the nodes meet.

    Returns:
        The ranks' exit code.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _hand_on)
    try:
        torchrun(
            [
                f"--nproc-per-node={nproc}",
                f"--nnodes={nnodes}",
                *([f"--node-rank={os.environ['NODE_RANK']}"] if "NODE_RANK" in os.environ else []),
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={rdzv_endpoint}",
                "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",  # SIGTERM would be answered by killing the ranks
                *arguments,
            ]
        )
    except ChildFailedError as error:
        return overall_code([failure.exitcode for failure in error.failures.values()])
    return 0


@dataclass(kw_only=True)
class JobOptions:
    """A job over the nodes of an allocation; flags behind these are configuration keys."""

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file."""

    nodes: int
    """Nodes to train on; those that the allocation has beyond them are spares."""

    nproc: int
    """Ranks on each node."""

    hosts_file: Path = field(default_factory=lambda: Path(os.environ.get("PBS_NODEFILE", "hosts.txt")))
    """Hosts of the allocation, one a line; repeated lines count once. Default: PBS_NODEFILE."""

    start: str = "ssh {host}"
    """Command that starts another on a host, for example "srun --nodes=1 --ntasks=1 --nodelist={host}"."""

    port: int = 29500
    """Port where the nodes meet, on the first of them; each restart takes the next one."""

    state: Path = Path(".")
    """Folder of bad_nodes.txt: the run's dump folder."""

    max_restarts: int = 5
    """Restarts before giving up."""

    back_off: float = 30.0
    """Pause before the first restart, s; doubles each time, up to 10 minutes."""

    preflight: bool = True
    """Check nodes and links before each start, and leave out those that fail."""

    grace: float = 120.0
    """When one node's ranks have ended, how long the others may go on, s."""


Run = Callable[[list[str], list[str]], dict[str, int]]
"""(hosts, command of each) -> exit code by host."""


def launch(options: JobOptions, flags: list[str], program: list[str] | None = None) -> int:
    """Check, start, and restart without bad nodes.

    Args:
        options: the job.
        flags: ``--section.key value`` words for the training.
        program: how to call mula-titan; by default this interpreter's.

    Returns:
        Exit code of the last run; :data:`PREFLIGHT` if too few nodes are good.

    Raises:
        ValueError: no hosts, or fewer than ``nodes``.
    """
    program = program or [sys.executable, "-m", "mula_titan.cli"]
    hosts = _hosts(options)
    for attempt in range(options.max_restarts + 1):
        port = options.port + 2 * attempt
        good = [host for host in hosts if host not in read_bad_nodes(options.state / BAD_NODES)]
        if options.preflight:
            good = _preflight(options, program, good, port + 1)
        if len(good) < options.nodes:
            print(f"mula-titan launch: {len(good)} good nodes, {options.nodes} needed", file=sys.stderr)
            return PREFLIGHT
        chosen = good[: options.nodes]
        print(f"mula-titan launch: start {attempt + 1} on {', '.join(chosen)}", flush=True)
        command = [*program, "train", str(options.config), *_meeting(options, chosen, port), *flags]
        codes = run_on(options, chosen, command)
        code = overall_code(list(codes.values()))
        if code in FINAL:
            return code
        for host, own in codes.items():
            if own == 255:  # ssh and srun: the host could not be reached
                _add_bad_node(options.state, host, "could not be reached")
        if attempt == options.max_restarts:
            break
        pause = min(600.0, options.back_off * 2**attempt)
        print(f"mula-titan launch: ended with {code}; starting again in {pause:.0f} s", flush=True)
        time.sleep(pause)
    print(f"mula-titan launch: giving up after {options.max_restarts} restarts", file=sys.stderr)
    return code


def _hosts(options: JobOptions) -> list[str]:
    if not options.hosts_file.is_file():
        raise ValueError(f"--hosts-file {options.hosts_file}: no such file; write the allocation's hosts, one a line")
    hosts = list(dict.fromkeys(options.hosts_file.read_text().split()))
    if len(hosts) < options.nodes:
        raise ValueError(f"--nodes {options.nodes}: {options.hosts_file} has only {len(hosts)} hosts")
    return hosts


def _meeting(options: JobOptions, hosts: list[str], port: int) -> list[str]:
    nodes = ["--nproc", str(options.nproc), "--nnodes", str(len(hosts))]
    return [*nodes, "--rdzv-endpoint", f"{hosts[0]}:{port}"]


def _preflight(options: JobOptions, program: list[str], hosts: list[str], port: int) -> list[str]:
    """Hosts that pass alone, and then together."""
    alone = run_on(options, hosts, [*program, "preflight", "--nproc", str(options.nproc)], alone=True)
    good = [host for host in hosts if alone.get(host) == 0]
    if len(good) > 1:
        listed = (options.state / "good_hosts.txt").absolute()
        listed.unlink(missing_ok=True)
        command = [*program, "preflight", *_meeting(options, good, port), "--good-hosts", str(listed)]
        run_on(options, good, command)
        if listed.exists():
            passed = listed.read_text().split()
            good = [host for host in good if host in passed]
    for host in hosts:
        if host not in good:
            print(f"mula-titan launch: {host} failed the preflight and is left out", flush=True)
    return good


def run_on(options: JobOptions, hosts: list[str], command: list[str], *, alone: bool = False) -> dict[str, int]:
    """Run a command on every host at once; exit code by host.

    Args:
        options: how to start it, and how long to wait for the others when one has failed.
        hosts: where.
        command: what; each host gets NODE_RANK and its name in the environment.
        alone: the hosts don't wait for one another.
    """
    running: dict[str, subprocess.Popen] = {}
    for rank, host in enumerate(hosts):
        prefix = shlex.split(options.start.format(host=host))
        names = [f"{HOST_VARIABLE}={host}", *([] if alone else [f"NODE_RANK={rank}"])]
        # A shell on the other side, as ssh has one, splits the words again.
        words = [*prefix, "env", *(shlex.quote(word) if prefix[:1] == ["ssh"] else word for word in [*names, *command])]
        running[host] = subprocess.Popen(words)

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in running.values():
            process.send_signal(number)

    previous = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        deadline = float("inf")
        while any(process.poll() is None for process in running.values()):
            if not alone and any(process.poll() is not None for process in running.values()):
                deadline = min(deadline, time.monotonic() + options.grace)
            if time.monotonic() > deadline:
                for process in running.values():
                    process.kill()
            time.sleep(0.2)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return {host: process.returncode for host, process in running.items()}


def _add_bad_node(folder: Path, host: str, reason: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / BAD_NODES).open("a") as file:
        file.write(f"{host}  # {reason}\n")
