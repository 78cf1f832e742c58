"""Why a step went wrong: two more runs of it with hooks, compared over all ranks and written down."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from mula_titan.components.bad_nodes import BAD_NODES, read_bad_nodes
from mula_titan.components.step_trace import StepTrace, first_bad, first_difference


@dataclass
class Finding:
    """One rank's part in a step that was run twice."""

    rank: int
    host: str
    loss: float
    """This rank's share in the run that was judged."""
    first_bad: str | None = None
    first_bad_at: int | None = None
    """Number of the event, by which ranks are compared."""
    first_difference: str | None = None
    first_difference_at: int | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Where this rank's sequences of the step come from."""


@dataclass
class Diagnosis:
    """All ranks' findings."""

    step: int
    faults: list[str]
    findings: list[Finding]
    repeated: bool = True
    """Whether the replay was run."""

    @property
    def origin(self) -> Finding | None:
        """The rank where the first value that isn't finite arose."""
        bad = [f for f in self.findings if f.first_bad_at is not None]
        return min(bad, key=lambda f: (f.first_bad_at, f.rank), default=None)

    @property
    def suspects(self) -> list[Finding]:
        """Ranks whose hardware is in doubt.

        Those whose two runs differ to the bit before any other rank's do, or, if the fault is gone in the replay, those
        whose own loss wasn't finite.
        """
        different = [f for f in self.findings if f.first_difference_at is not None]
        if different:
            first = min(f.first_difference_at for f in different)  # type: ignore[type-var]
            return [f for f in different if f.first_difference_at == first]
        if self.faults and self.repeated and self.origin is None:
            return [f for f in self.findings if not math.isfinite(f.loss)]
        return []

    def text(self) -> str:
        """For the user, one paragraph."""
        words = [f"Step {self.step}: {'; '.join(self.faults)}." if self.faults else f"Step {self.step}:"]
        bad = [f for f in self.findings if not math.isfinite(f.loss)]
        if bad:
            words.append(f"Loss not finite on {', '.join(f'rank {f.rank} ({f.host})' for f in bad[:8])}.")
        if self.origin is not None:
            words.append(f"First bad: {self.origin.first_bad} on rank {self.origin.rank} ({self.origin.host}).")
        if self.suspects:
            who = ", ".join(f"rank {f.rank} ({f.host}) at {f.first_difference}" for f in self.suspects[:8])
            words.append(
                f"Two runs of the step differ to the bit, first on {who}: suspect the hardware."
                if self.suspects[0].first_difference
                else f"The fault did not come back in two more runs: suspect the hardware of {who.split(' at ')[0]}."
            )
        elif self.repeated:
            words.append("Two more runs agree to the bit on every rank: not a fault of the hardware.")
        places = [s for f in (bad or self.findings)[:1] for s in f.samples[:2]]
        words += [f"Sample {s['sample']}: {s.get('path', '?')}, token {s.get('token', '?')}." for s in places]
        return " ".join(words)

    def write(self, folder: Path) -> None:
        """Write ``report.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {**asdict(self), "suspects": [f.rank for f in self.suspects], "text": self.text()}
        content["origin"] = None if self.origin is None else self.origin.rank
        for finding in content["findings"]:
            if not math.isfinite(finding["loss"]):
                finding["loss"] = str(finding["loss"])  # JSON has no nan
        (folder / "report.json").write_text(json.dumps(content, indent=1))

    def blame(self, dump_folder: Path) -> list[str]:
        """Add the suspects' hosts to the bad-node list; those that are new."""
        path = dump_folder / BAD_NODES
        known = read_bad_nodes(path)
        hosts = [host for host in dict.fromkeys(f.host for f in self.suspects) if host not in known]
        with path.open("a") as file:
            file.writelines(f"{host}  # step {self.step}: replay differed or fault not repeatable\n" for host in hosts)
        return hosts


def run_twice(model_parts: list[nn.Module], run: Callable[[], torch.Tensor | None], finding: Finding) -> None:
    """Run a step twice with hooks and note in ``finding`` what was bad and what differs. Collective, as the step is.

    Args:
        model_parts: whose modules are watched.
        run: forward and backward of the whole step from the same state each time.
        finding: this rank's.
    """
    runs = []
    for _ in range(2):
        trace = StepTrace()
        with trace.watch(model_parts):
            run()
        runs.append(trace.events())
    if (bad := first_bad(runs[0])) is not None:
        finding.first_bad, finding.first_bad_at = runs[0][bad].name, bad
    if (difference := first_difference(*runs)) is not None:
        longer = max(runs, key=len)
        finding.first_difference, finding.first_difference_at = longer[difference].name, difference


def gather(finding: Finding) -> list[Finding]:
    """The findings of all ranks. A collective call."""
    findings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    return findings
