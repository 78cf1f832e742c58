"""Numerical guard: one tiny reduction a step says, on all ranks alike, whether the update may happen."""

import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.config import Configurable

from mula_titan.exit_codes import NUMERICS, FatalFault

Policy = Literal["off", "stop", "skip", "rollback"]


@dataclass(frozen=True)
class Verdict:
    """What all ranks together say about a step."""

    loss: float
    """Mean loss over the valid tokens of the step."""
    grad_norm: float
    faults: list[str] = field(default_factory=list)
    """What is wrong, for the user; empty if the update may happen."""
    stop: bool = False
    """Some rank was asked to end."""


class Vote:
    """The reduction: a few float32 numbers, summed over all ranks, then read by the host.

    Args:
        device: where collectives take their tensors.
        loss_copies: ranks that hold the same share of the loss (tensor-parallel degree).
    """

    NUM_VALUES = 6

    def __init__(self, device: torch.device, loss_copies: int):
        self._device = device
        self._loss_copies = loss_copies

    def sum(
        self,
        *,
        loss: torch.Tensor | None = None,
        grad_norm: torch.Tensor | None = None,
        bad_weights: torch.Tensor | None = None,
        stop: bool = False,
    ) -> list[float]:
        """[loss, mean grad norm, ranks with a bad loss, ... norm, ... weights, ... that must stop]. A collective call.

        Args:
            loss: this rank's share; None on pipeline stages without one.
            grad_norm: of all gradients, the same on all ranks.
            bad_weights: scalar, positive if a local weight isn't finite.
            stop: this rank was asked to end.
        """
        zero = torch.zeros((), device=self._device)
        loss, norm = (zero if x is None else local_part(x).float().reshape(()) for x in (loss, grad_norm))
        loss_is_bad, norm_is_bad = (~torch.isfinite(x) for x in (loss, norm))
        values = torch.stack(
            [
                torch.where(loss_is_bad, zero, loss / self._loss_copies),
                torch.where(norm_is_bad, zero, norm / dist.get_world_size()),
                loss_is_bad.float(),
                norm_is_bad.float(),
                zero if bad_weights is None else (bad_weights > 0).float(),
                torch.full_like(zero, float(stop)),
            ]
        )
        dist.all_reduce(values)
        return values.tolist()


def local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's values of a tensor, without gradient."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


class _Spikes:
    """Alarm when a value lies far above those of the last steps."""

    def __init__(self, sigma: float, window: int):
        self.sigma, self.values = sigma, deque[float](maxlen=window)

    def threshold(self) -> float:
        """Mean plus ``sigma`` standard deviations, at least 1 % of the mean each; infinite while there are too few."""
        values = self.values
        if not self.sigma or len(values) < (values.maxlen or 1):
            return math.inf
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        return mean + self.sigma * max(deviation, 0.01 * abs(mean))


class NumericalGuard(Configurable):
    """Decides before each update whether loss, gradient norm and weights are sound, and how often they may not be.

    A skipped step leaves weights, moments, schedule, balancing state and counters as they were; its data is used up
    and its number counts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        policy: Policy = "stop"
        """
        What to do with a step whose loss or gradient isn't finite, or spikes. stop: end the run; skip: leave out the
        update; rollback: load the newest checkpoint and go on with the data behind the bad step; off: no check.
        """

        check_weights: bool = False
        """Look at every weight too, not only at loss and gradient norm; reads all weights once a step."""

        spike_sigma: float = 0.0
        """
        A loss or gradient norm more than so many standard deviations above the mean of the last `spike_window` good
        steps is a fault. 0: spikes are none.
        """

        spike_window: int = 128
        """Good steps that spikes are measured against; none is seen before there are so many."""

        max_in_a_row: int = 3
        """Faulty steps one after another that are skipped or rolled back; one more stops the run."""

        max_in_window: int = 10
        """Faulty steps within `window` steps that are skipped or rolled back; one more stops the run."""

        window: int = 1000
        """Steps that `max_in_window` looks back on."""

        find_cause: bool = True
        """Run a faulty step twice more with hooks to name the first bad module, and tell software from hardware."""

        bundles: int = 3
        """Faulty steps that are written to `faults/` for replay, with weights, batches and random states."""

        def __post_init__(self) -> None:
            least = {
                "spike_sigma": 0,
                "spike_window": 2,
                "max_in_a_row": 0,
                "max_in_window": 0,
                "window": 1,
                "bundles": 0,
            }
            for name, bound in least.items():
                if not getattr(self, name) >= bound:
                    raise ValueError(f"{name} = {getattr(self, name)} must be at least {bound}")

    def __init__(self, config: Config):
        self.config = config
        self.in_a_row = 0
        self.total = 0
        self._faulty_steps: deque[int] = deque()
        self._seen = 0  # steps looked at; goes on through rollbacks
        self._loss = _Spikes(config.spike_sigma, config.spike_window)
        self._norm = _Spikes(config.spike_sigma, config.spike_window)

    @property
    def is_on(self) -> bool:
        """Whether steps are checked."""
        return self.config.policy != "off"

    @torch.no_grad()
    def bad_weights(self, model_parts: list[nn.Module]) -> torch.Tensor | None:
        """Number of local weight tensors with a value that isn't finite; None if they aren't watched."""
        if not self.config.check_weights:
            return None
        weights = [local_part(p) for part in model_parts for p in part.parameters()]
        sums = torch.stack([w.float().abs().amax() for w in weights if w.numel()])
        return (~torch.isfinite(sums)).sum()

    def judge(self, votes: list[float]) -> Verdict:
        """The verdict on a step from :meth:`Vote.sum`, the same on all ranks."""
        loss, norm, bad_losses, bad_norms, bad_weights, stop = votes
        faults = []
        if bad_losses:
            faults.append(f"loss not finite on {bad_losses:.0f} ranks")
        if bad_norms:
            faults.append("gradient norm not finite")
        if bad_weights:
            faults.append(f"weights not finite on {bad_weights:.0f} ranks")
        if not faults:
            for name, value, spikes in (("loss", loss, self._loss), ("gradient norm", norm, self._norm)):
                if value > spikes.threshold():
                    faults.append(f"{name} {value:.4g} spikes above {spikes.threshold():.4g}")
        self._count(loss, norm, bool(faults))
        return Verdict(loss, norm, faults, stop > 0)

    def _count(self, loss: float, norm: float, is_faulty: bool) -> None:
        self._seen += 1
        if not is_faulty:
            self.in_a_row = 0
            self._loss.values.append(loss)
            self._norm.values.append(norm)
            return
        self.in_a_row += 1
        self.total += 1
        self._faulty_steps.append(self._seen)
        while self._faulty_steps[0] <= self._seen - self.config.window:
            self._faulty_steps.popleft()

    def refuse_too_many(self, text: str, exit_code: int = NUMERICS) -> None:
        """End the run if the policy says so, or if too many steps were faulty.

        Args:
            text: what happened.
            exit_code: to end with.

        Raises:
            FatalFault: it must stop.
        """
        c = self.config
        if c.policy == "stop":
            raise FatalFault(f'{text} guard.policy is "stop".', exit_code)
        if self.in_a_row > c.max_in_a_row:
            raise FatalFault(f"{text} These are {self.in_a_row} in a row, more than guard.max_in_a_row.", exit_code)
        if len(self._faulty_steps) > c.max_in_window:
            n = len(self._faulty_steps)
            raise FatalFault(f"{text} These are {n} in {c.window} steps, more than guard.max_in_window.", exit_code)

    def state_dict(self) -> str:
        """Counters and the window of good values, as text: its length varies, which a tensor's may not."""
        return json.dumps(
            {
                "in_a_row": self.in_a_row,
                "total": self.total,
                "seen": self._seen,
                "faulty_steps": list(self._faulty_steps),
                "loss": list(self._loss.values),
                "norm": list(self._norm.values),
            }
        )

    def load_state_dict(self, state: str) -> None:
        """Go on counting; a window of another length keeps the newest values."""
        s = json.loads(state)
        self.in_a_row, self.total, self._seen = s["in_a_row"], s["total"], s["seen"]
        self._faulty_steps = deque(s["faulty_steps"])
        for spikes, values in ((self._loss, s["loss"]), (self._norm, s["norm"])):
            spikes.values.clear()
            spikes.values.extend(values)
