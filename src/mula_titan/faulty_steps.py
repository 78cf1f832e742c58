"""What the trainer does with a step that went wrong: find the cause, keep it for replay, skip it or roll back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.tools.logging import logger

from mula_titan.components.bad_nodes import host_name
from mula_titan.components.diagnosis import Diagnosis, Finding, gather, run_twice
from mula_titan.components.guard import Verdict, local_part
from mula_titan.components.load_balance import moe_layers
from mula_titan.components.random_state import RandomState
from mula_titan.components.step_data import StepData
from mula_titan.exit_codes import HARDWARE, NUMERICS, FatalFault

FAULTS = "faults"
"""Folder below the dump folder; in it step-N/ with report.json and what a replay needs."""


@dataclass(kw_only=True, slots=True)
class Replay:
    """Running steps twice to tell faults of the hardware from those of the software."""

    interval: int = 0
    """
    Every so many steps, run forward and backward twice more with hooks and compare them to the bit, before the update.
    0: never. Needs deterministic kernels.
    """

    bundle: str = ""
    """Instead of training, replay this folder `faults/step-N`, on as many ranks as wrote it."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"interval = {self.interval} must be at least 0")


class FaultySteps:
    """Acts on the numerical guard's verdicts, and runs steps again.

    Args:
        trainer: the :class:`mula_titan.trainer.MulaTrainer` whose steps these are.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.random_state = RandomState()
        self.dump_folder = Path(trainer.config.dump_folder)

    def handle(self, data: StepData, verdict: Verdict, loss: torch.Tensor) -> None:
        """Say why, keep what a replay needs, and do what the policy says. The update does not happen."""
        diagnosis = self._diagnose(
            data, verdict.faults, float(local_part(loss)), again=self.trainer.guard.config.find_cause
        )
        folder = self.dump_folder / FAULTS / f"step-{data.step}"
        if self.trainer.guard.total <= self.trainer.guard.config.bundles:
            self._write_bundle(data, folder)
        self._forget()
        self._publish(diagnosis, folder)
        code = HARDWARE if diagnosis.suspects else NUMERICS
        self.trainer.guard.refuse_too_many(diagnosis.text(), code)
        if self.trainer.guard.config.policy == "rollback":
            self._roll_back(diagnosis.text(), code)

    def _diagnose(self, data: StepData, faults: list[str], loss: float, *, again: bool) -> Diagnosis:
        """All ranks' findings about a step. A collective call."""
        samples = [{"sample": sample, **asdict(self.trainer.dataloader.locate(sample))} for sample in data.samples]
        finding = Finding(dist.get_rank(), host_name(), loss, samples=samples)
        if again:
            with self._as_before(data):
                run_twice(self.trainer.model_parts, lambda: self._run_again(data), finding)
        return Diagnosis(data.step, faults, gather(finding), repeated=again)

    @contextmanager
    def _as_before(self, data: StepData) -> Iterator[None]:
        """Replays leave nothing behind: token count and random states are those of the run that counts."""
        tokens, forward_backward = self.trainer.ntokens_seen, self.trainer.fwd_bwd_fn
        state = self.random_state.state_dict()
        self.trainer.fwd_bwd_fn = self.trainer._forward_backward_body  # without CUDA graphs, whose modules run no hooks
        yield
        self.trainer.ntokens_seen = tokens
        self.trainer.fwd_bwd_fn = forward_backward
        self.random_state.load_state_dict(state)

    def _run_again(self, data: StepData) -> torch.Tensor:
        self._forget()
        self.random_state.load_state_dict(data.random_state)
        return self.trainer.forward_backward(data)

    def _forget(self) -> None:
        """Zero gradients and balancing counters, as before the step."""
        self.trainer.optimizers.zero_grad()
        for _, moe in moe_layers(self.trainer.model_parts):
            moe.tokens_per_expert_E.zero_()
        for part in self.trainer.model_parts:
            last = getattr(part, "last_router_sums_L2", None)
            part.start_step()
            if last is not None:
                part.last_router_sums_L2 = last

    def compare_replays(self, data: StepData) -> None:
        """Two more runs of a sound step must agree to the bit on every rank; the last one's gradients are used.

        Raises:
            FatalFault: they don't; the suspects' hosts are in the bad-node list.
        """
        diagnosis = self._diagnose(data, [], 0.0, again=True)
        if diagnosis.suspects:
            folder = self.dump_folder / FAULTS / f"step-{data.step}"
            self._write_bundle(data, folder)
            self._publish(diagnosis, folder)
            raise FatalFault(diagnosis.text(), HARDWARE)

    def _publish(self, diagnosis: Diagnosis, folder: Path) -> None:
        """Log, report.json, bad-node list. A file that can't be written is no reason to end the run."""
        if dist.get_rank() != 0:
            return
        logger.error(f"{diagnosis.text()} Report: {folder / 'report.json'}")
        try:
            diagnosis.write(folder)
            diagnosis.blame(self.dump_folder)
        except OSError as error:
            logger.error(f"The report of step {diagnosis.step} could not be written: {error}")

    def _write_bundle(self, data: StepData, folder: Path) -> None:
        """Weights, batches and random states of a step, if they can be written. A collective call."""
        try:
            data.save(folder / f"rank_{dist.get_rank()}.pt", dist.get_world_size())
        except OSError as error:
            logger.error(f"The batches of step {data.step} could not be written: {error}")
        try:
            dcp.save(ModelWrapper(self.trainer.model_parts).state_dict(), checkpoint_id=str(folder / "model"))
        except CheckpointException as error:  # on all ranks alike
            logger.error(f"The weights of step {data.step} could not be written: {error}")

    def _roll_back(self, text: str, exit_code: int) -> None:
        """Load the newest good checkpoint and go on with the data behind the bad step."""
        position, counters = self.trainer.dataloader.state_dict(), self.trainer.guard.state_dict()
        self.trainer.checkpointer.maybe_wait_for_saving()
        if not self.trainer.checkpointer.load():
            raise FatalFault(f"{text} There is no checkpoint to roll back to.", exit_code)
        self.trainer.dataloader.load_state_dict(position)
        self.trainer.guard.load_state_dict(counters)
        logger.warning(f"Rolled back to step {self.trainer.step}; the data goes on behind the bad step.")

    def replay_bundle(self) -> int:
        """Run the step of ``replay.bundle`` twice and say what was bad; an exit code."""
        folder = Path(self.trainer.config.replay.bundle)
        data = StepData.load(folder / f"rank_{dist.get_rank()}.pt", dist.get_world_size(), self.trainer.device)
        model = ModelWrapper(self.trainer.model_parts)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=str(folder / "model"))
        model.load_state_dict(state)
        diagnosis = self._diagnose(data, [], 0.0, again=True)
        if dist.get_rank() == 0:
            print(diagnosis.text())
        return HARDWARE if diagnosis.suspects else NUMERICS if diagnosis.origin else 0
