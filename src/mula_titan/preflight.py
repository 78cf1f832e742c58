"""Check of devices and links before a job: ``mula-titan preflight``, or ``torchrun -m mula_titan.preflight``.

Every rank multiplies matrices whose product is known exactly, writes and reads back memory, and sends numbers that the
receiver can check to the bit. Speeds are compared with the median of all ranks.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from mula_titan.components.bad_nodes import host_name
from mula_titan.exit_codes import PREFLIGHT
from mula_titan.runtime.device import BACKENDS, select_device

SPEEDS = (
    ("tflops", "matrix product", "TFLOP/s"),
    ("memory_gbps", "memory", "GB/s"),
    ("link_gbps", "link", "GB/s"),
)
"""Fields of a report that are compared, their names and units."""


@dataclass(kw_only=True)
class PreflightOptions:
    """Sizes and limits of the checks."""

    matmul_size: int = 2048
    """Rows and columns of the matrices, a power of two."""

    repeats: int = 5
    """Times that each speed is measured; the best counts."""

    memory_mib: int = 256
    """Memory that is written and read back, on each device."""

    message_mib: int = 16
    """Bytes that each rank sends in a link check."""

    tolerance: float = 0.7
    """Least part of the median speed that a device or link must reach. 0: speeds don't count."""

    timeout: int = 120
    """Longest wait for another rank, s."""

    good_hosts: Path | None = None
    """File to write with the hosts where all is well, one a line."""

    def __post_init__(self) -> None:
        if self.matmul_size < 1 or self.matmul_size & (self.matmul_size - 1):
            raise ValueError(f"--matmul-size {self.matmul_size}: must be a power of two")
        for name in ("repeats", "memory_mib", "message_mib", "timeout"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


@dataclass
class RankReport:
    """What one rank measured."""

    rank: int
    host: str
    device: str
    problems: list[str]
    """What is wrong; empty if it passed."""
    tflops: float = 0.0
    memory_gbps: float = 0.0
    """Device memory bandwidth of a copy, GB/s, reads and writes together."""
    link_gbps: float = 0.0
    """From this rank to the next one and back, GB/s each way."""


def check_matmul(device: torch.device, size: int, repeats: int) -> tuple[list[str], float]:
    """Multiply in bf16 and fp32 with an exactly known product; (problems, bf16 TFLOP/s).

    With r[i] = i mod 3 - 1 and random signs t[k], A[i, k] = r[i] t[k] and B[k, j] = t[k] r[j], so that C[i, j] =
    size r[i] r[j] to the bit: -1, 0, 1 and a power of two are exact in every format.
    """
    signs = (torch.arange(size, device=device) % 3 - 1).float()
    inner = (torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)) * 2 - 1).to(device).float()
    problems = []
    best = float("inf")
    for dtype in (torch.float32, torch.bfloat16):
        a = (signs[:, None] * inner[None, :]).to(dtype)
        b = (inner[:, None] * signs[None, :]).to(dtype)
        want = size * signs[:, None] * signs[None, :]
        for _ in range(repeats):
            _wait(device)
            begin = time.perf_counter()
            c = a @ b
            _wait(device)
            if dtype == torch.bfloat16:
                best = min(best, time.perf_counter() - begin)
            wrong = int((c.float() != want).sum())
            if wrong:
                problems.append(f"{wrong} of {size * size} entries of a {dtype} matrix product are wrong")
                break
    return problems, 2 * size**3 / best / 1e12


def check_memory(device: torch.device, mib: int, repeats: int) -> tuple[list[str], float]:
    """Write patterns, read them back, copy; (problems, GB/s)."""
    words = mib * 2**20 // 8
    x = torch.empty(words, dtype=torch.int64, device=device)
    problems = []
    for pattern in (0, -1, 0x5555555555555555, -0x5555555555555556):
        x.fill_(pattern)
        wrong = int((x != pattern).sum())
        if wrong:
            problems.append(f"{wrong} of {words} words of memory don't keep {pattern:#x}")
    y = torch.empty_like(x)
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        y.copy_(x)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return problems, 2 * words * 8 / best / 1e9


def check_links(device: torch.device, mib: int, repeats: int) -> tuple[list[str], float]:
    """All-reduce, all-to-all and a ring of sends with known results; (problems, GB/s to the next rank). Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = mib * 2**20 // 4 // world * world
    position = torch.arange(count, device=device) % 64
    problems = []

    x = (position + rank).float()
    dist.all_reduce(x)
    want = (world * position + world * (world - 1) // 2).float()  # whole numbers, exact in fp32
    if not torch.equal(x, want):
        problems.append(f"all-reduce: {int((x != want).sum())} of {count} sums are wrong")

    sent = (position + 64 * rank).float()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    piece = count // world
    for source in range(world):
        want = (position[rank * piece : (rank + 1) * piece] + 64 * source).float()
        if not torch.equal(got[source * piece : (source + 1) * piece], want):
            problems.append(f"all-to-all: what rank {source} sent arrived changed")

    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
        )
        for work in works:
            work.wait()
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    want = (position + 64 * ((rank - 1) % world)).float()
    if not torch.equal(got, want):
        problems.append(f"send: what rank {(rank - 1) % world} sent arrived changed")
    return problems, count * 4 / best / 1e9


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def slow(reports: list[RankReport], tolerance: float) -> None:
    """Add a problem to every report whose speed is below ``tolerance`` times the median."""
    for name, text, unit in SPEEDS:
        median = statistics.median(getattr(report, name) for report in reports)
        for report in reports:
            value = getattr(report, name)
            if value < tolerance * median:
                report.problems.append(f"{text} at {value:.3g} {unit}, median {median:.3g}")


def check(options: PreflightOptions, device: torch.device) -> list[RankReport]:
    """All checks on all ranks of the process group; the reports of all ranks on each. Collective."""
    report = RankReport(dist.get_rank(), host_name(), _device_name(device), [])
    found, report.tflops = check_matmul(device, options.matmul_size, options.repeats)
    report.problems += found
    found, report.memory_gbps = check_memory(device, options.memory_mib, options.repeats)
    report.problems += found
    if dist.get_world_size() > 1:
        found, report.link_gbps = check_links(device, options.message_mib, options.repeats)
        report.problems += found
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    slow(reports, options.tolerance)
    return reports


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def show(reports: list[RankReport], console: Console) -> None:
    """Print a table with one line a rank."""
    table = Table(title="Preflight")
    for name in ("rank", "host", "device", "TFLOP/s", "memory GB/s", "link GB/s", "result"):
        table.add_column(name, justify="right" if name[-1] in "ks" else "left")
    for r in reports:
        speeds = (f"{value:.3g}" for value in (r.tflops, r.memory_gbps, r.link_gbps))
        table.add_row(str(r.rank), r.host, r.device, *speeds, "; ".join(r.problems) or "pass")
    console.print(table)


def good_hosts(reports: list[RankReport]) -> list[str]:
    """Hosts whose ranks all passed, in rank order."""
    bad = {report.host for report in reports if report.problems}
    return [host for host in dict.fromkeys(report.host for report in reports) if host not in bad]


def main(words: list[str] | None = None) -> None:
    """One rank of the check; exits with :data:`PREFLIGHT` if any rank failed."""
    options = tyro.cli(PreflightOptions, prog="mula-titan preflight", args=words)
    kind = select_device()
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind != "cpu" else torch.device("cpu")
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(BACKENDS[kind], timeout=timedelta(seconds=options.timeout))
    reports = check(options, device)
    if dist.get_rank() == 0:
        console = Console(width=None if sys.stdout.isatty() else 160)
        show(reports, console)
        good = good_hosts(reports)
        if options.good_hosts is not None:
            options.good_hosts.parent.mkdir(parents=True, exist_ok=True)
            options.good_hosts.write_text("".join(f"{host}\n" for host in good))
        failed = sum(bool(report.problems) for report in reports)
        console.print(f"{len(reports) - failed} of {len(reports)} ranks pass; good hosts: {', '.join(good) or 'none'}")
    dist.barrier()
    dist.destroy_process_group()
    if any(report.problems for report in reports):
        sys.exit(PREFLIGHT)


if __name__ == "__main__":
    main()
