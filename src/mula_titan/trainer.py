"""MulaTrainer: torchtitan's Trainer with the Mula models, router losses, checks around the update, and a report.

Shape suffixes: B = batch, L = sequence length.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from mula_titan.components.checkpoint import MulaCheckpointManager
from mula_titan.components.fault_injection import FaultInjection
from mula_titan.components.guard import NumericalGuard, Verdict, Vote
from mula_titan.components.metrics import MulaMetricsProcessor
from mula_titan.components.optimizer import AdamWContainer
from mula_titan.components.preemption import Preemption
from mula_titan.components.replicas import ReplicaCheck
from mula_titan.components.step_data import StepData, samples_of_step
from mula_titan.components.validation import MulaValidator
from mula_titan.components.watchdog import Watchdog, phase
from mula_titan.data.loader import TokenDataLoader
from mula_titan.exit_codes import NUMERICS, REQUEUE, FatalFault
from mula_titan.faulty_steps import FaultySteps, Replay
from mula_titan.model.args import MulaArgs
from mula_titan.model.spec import model_spec


class MulaTrainer(Trainer):
    """Training loop of the Mula models; its order of work is torchtitan's.

    :meth:`train_step` is written anew, since torchtitan's has no place between gradients and update, where the
    numerical guard must act; the loop around it is torchtitan's own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        model: MulaArgs = field(default_factory=MulaArgs)
        """Architecture; the model is built from it."""

        dataloader: TokenDataLoader.Config = field(default_factory=TokenDataLoader.Config)
        optimizer: AdamWContainer.Config = field(default_factory=AdamWContainer.Config)
        checkpoint: MulaCheckpointManager.Config = field(default_factory=MulaCheckpointManager.Config)
        metrics: MulaMetricsProcessor.Config = field(default_factory=MulaMetricsProcessor.Config)
        validator: MulaValidator.Config = field(default_factory=MulaValidator.Config)

        guard: NumericalGuard.Config = field(default_factory=NumericalGuard.Config)
        """What happens when loss or gradients aren't finite, or spike."""

        replay: Replay = field(default_factory=Replay)
        """Running steps twice."""

        watchdog: Watchdog.Config = field(default_factory=Watchdog.Config)
        """What happens when a step, save or validation hangs."""

        preemption: Preemption.Config = field(default_factory=Preemption.Config)
        """What happens on a signal or at the end of the walltime."""

        replicas: ReplicaCheck.Config = field(default_factory=ReplicaCheck.Config)
        """Comparison of the ranks."""

        fault_injection: FaultInjection.Config = field(default_factory=FaultInjection.Config)
        """Damage on purpose, for tests."""

        def __post_init__(self) -> None:
            self.model_spec = model_spec(self.model)  # type: ignore[misc]  # a field of the parent's slots
            for loader in (self.dataloader, self.validator.dataloader):
                if isinstance(loader, TokenDataLoader.Config):
                    # One switch and one vocabulary for the model and its data.
                    loader.document_mask = self.model.document_mask
                    loader.vocab_size = self.model.vocab_size
            # The data ends before a step that it cannot fill, so the saved position never runs ahead of the weights.
            self.dataloader.global_batch_size = max(0, self.training.global_batch_size)
            Trainer.Config.__post_init__(self)

    config: Config
    metrics_processor: MulaMetricsProcessor
    checkpointer: MulaCheckpointManager
    optimizers: AdamWContainer
    validator: MulaValidator
    ntokens_seen: int
    fwd_bwd_fn: Any

    def __init__(self, config: Config):
        if config.training.mixed_precision_param == "bfloat16":
            # Only routers multiply in float32 then, and TF32 holds their bf16 factors exactly.
            torch.backends.cuda.matmul.allow_tf32 = True
        super().__init__(config)
        self.checkpointer.model_info = {"args": config.model, "hf_assets_path": config.hf_assets_path}
        self.guard: NumericalGuard = config.guard.build()
        self.preemption: Preemption = config.preemption.build()
        self.watchdog: Watchdog = config.watchdog.build(dump_folder=config.dump_folder)
        self.replicas: ReplicaCheck = config.replicas.build()
        self.injected: FaultInjection | None = None
        if config.fault_injection.kind != "none":
            self.injected = config.fault_injection.build()
            self.checkpointer.before_write = self.injected.before_write
        self.faulty_steps = FaultySteps(self)
        self._vote = Vote(self.device, loss_copies=self.parallel_dims.tp)
        if config.validator.enable and config.preemption.enable:
            self.validator.must_stop = self._must_stop_validation
        self._global_valid_tokens: torch.Tensor | None = None
        self._data_ended = False
        self.metrics_processor.num_layers, self.metrics_processor.top_k = config.model.n_layers, config.model.top_k

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor) -> torch.Tensor:
        """As torchtitan's; the token count of the step is kept for the router losses of its micro-batches."""
        self._global_valid_tokens = self.metrics_processor.step_valid_tokens = global_valid_tokens
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        self._num_backwards += 1
        if self._num_backwards == self.gradient_accumulation_steps:
            self.optimizers.finish_backward()
        return loss

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's; adds each token's share of the loss, ``(B, L)`` float32, for the router losses."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        assert self._global_valid_tokens is not None
        extra_kwargs["token_weights"] = (labels != IGNORE_INDEX).float() / self._global_valid_tokens
        return inputs, labels, extra_kwargs

    def train_step(self, data_iterator: Any) -> None:
        """One optimizer step; remembers whether the data ended.

        Raises:
            FatalFault: the run must end: a fault that the guard's policy doesn't forgive, or preemption, after a save.
        """
        with phase("step"):
            try:
                data = self._read_step(data_iterator)
            except DataloaderExhaustedError:
                self._data_ended = True
                raise
            must_stop = self._train_on(data)
        if must_stop and self.step < self.config.training.steps:
            self.checkpointer.save_now(self.step)
            saved = f"step {self.step} is saved" if self.checkpointer.enable else "nothing is saved: checkpoint.enable"
            raise FatalFault(f"Preempted ({self.preemption.reason or 'on another rank'}): {saved}.", REQUEUE)

    def _read_step(self, data_iterator: Any) -> StepData:
        """The next step's batches, left on the CPU, and their number of targets on all ranks."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        per_pass = self.num_pipeline_parallel_microbatches
        watched = self.guard.is_on or self.config.replay.interval
        rank = 0 if mesh is None else mesh.get_local_rank()
        samples = samples_of_step(self.dataloader, rank, self.gradient_accumulation_steps * per_pass) if watched else []
        groups = [[next(data_iterator) for _ in range(per_pass)] for _ in range(self.gradient_accumulation_steps)]
        local = torch.stack([(labels != IGNORE_INDEX).sum() for group in groups for _, labels in group]).sum()
        # Filled in, not copied, and it stays on the device: nothing waits for it.
        everywhere = torch.full((), int(local), dtype=torch.int64, device=self.device)
        if mesh is not None:
            everywhere = dist_utils.dist_sum_tensor(everywhere, mesh)
        state = self.faulty_steps.random_state.state_dict() if watched else {}
        return StepData(self.step, groups, local, everywhere, state, samples)

    def _train_on(self, data: StepData) -> bool:
        """Gradients, check, update, metrics; whether some rank was asked to end."""
        loss = self.forward_backward(data)
        if self.config.replay.interval and self.step % self.config.replay.interval == 0:
            self.faulty_steps.compare_replays(data)
        grad_norm = dist_utils.clip_grad_norm_(
            self.optimizers.parameters_to_clip(),
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        verdict = self._judge(loss, grad_norm)
        self.checkpointer.maybe_wait_for_staging()
        if verdict is not None and verdict.faults:
            self.faulty_steps.handle(data, verdict, loss)
        else:
            learning_rates = self.lr_schedulers.get_metrics()
            self.optimizers.step()
            self.lr_schedulers.step()
            if self.replicas.is_due(self.step):
                self.optimizers.wait()
                self.replicas.compare_weights(self.model_parts)
            if self.metrics_processor.should_log(self.step):
                self._log(data, loss, grad_norm, learning_rates)
        if self.injected:
            self.injected.after_step(data.step)
        return verdict is not None and verdict.stop

    def forward_backward(self, data: StepData) -> torch.Tensor:
        """All passes of a step from zero gradients; this rank's share of the mean loss."""
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        self._num_backwards = 0
        total: torch.Tensor | None = None
        with self.injected.in_step(data.step, self.model_parts) if self.injected else nullcontext():
            for group in data.groups:
                inputs = [{k: self._to_device(v) for k, v in batch.items()} for batch, _ in group]
                labels = [self._to_device(labels) for _, labels in group]
                pipelined = self.parallel_dims.pp_enabled
                loss = self.forward_backward_step(
                    input_dict=inputs if pipelined else inputs[0],
                    labels=labels if pipelined else labels[0],
                    global_valid_tokens=data.global_valid_tokens,
                ).detach()
                # A CUDA graph's next replay overwrites its output.
                total = loss.clone() if total is None else total.add_(loss)
        assert total is not None
        return total

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        """A batch's tensor on the device, by a copy that the host doesn't wait for."""
        return x if self.device.type == "cpu" else x.pin_memory().to(self.device, non_blocking=True)

    def _judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> Verdict | None:
        """What all ranks say, by one reduction that the host waits for; None if neither guard nor preemption is on."""
        if not self.guard.is_on and not self.config.preemption.enable:
            return None
        stop = self.preemption.requested()
        if not self.guard.is_on:
            return Verdict(0.0, 0.0, stop=self._vote.sum(stop=stop)[-1] > 0)
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        votes = self._vote.sum(
            loss=loss if has_loss else None,
            grad_norm=grad_norm,
            bad_weights=self.guard.bad_weights(self.model_parts),
            stop=stop,
        )
        return self.guard.judge(votes)

    def _must_stop_validation(self) -> bool:
        if self.injected:
            self.injected.in_validation()
        return self._vote.sum(stop=self.preemption.requested())[-1] > 0

    def _log(
        self, data: StepData, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rates: dict[str, float]
    ) -> None:
        """Metrics of a step, as torchtitan has them."""
        mean = largest = loss
        tokens = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            largest = loss * data.global_valid_tokens / data.local_valid_tokens.to(self.device)
        values = (
            dist_utils.dist_sum(mean, mesh),
            dist_utils.dist_max(largest, mesh),
            dist_utils.dist_sum(tokens, mesh),
        )
        if not math.isfinite(values[0]):
            raise FatalFault(f"The loss of step {self.step} is {values[0]}.", NUMERICS)
        metrics = {"n_tokens_seen": values[2], **learning_rates}
        if self.guard.is_on:
            metrics["guard/faulty_steps"] = self.guard.total
        self.metrics_processor.log(self.step, values[0], values[1], float(grad_norm), extra_metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's, with the guard's counters."""
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torchtitan's, with the guard's counters."""
        super().load_state_dict(state_dict)
        self.guard.load_state_dict(state_dict["guard"])

    def train(self) -> None:
        """Train from the newest checkpoint, or from the start, to ``training.steps`` or the end of the data."""
        super().train()
        if self._data_ended:
            self.step -= 1  # torchtitan cancels the step that found no data, but has counted it
            self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()

    def should_continue_training(self) -> bool:
        """Whether steps are left; the first call, right after the checkpoint is loaded, opens the progress line."""
        if self.metrics_processor.total_steps == 0:
            self._start_checks()
            self.metrics_processor.start(self.step, self.config.training.steps)
        return super().should_continue_training()

    def _start_checks(self) -> None:
        if self.injected:
            self.injected.at_start(self.model_parts)
        loader = self.config.dataloader
        paths = [loader.dataset_path] if loader.dataset_path else [source.path for source in loader.sources]
        # model_spec holds functions, whose addresses differ; it follows from [model].
        values = {key: value for key, value in self.config.to_dict().items() if key != "model_spec"}
        self.replicas.start(values, paths, self.model_parts)
        self.watchdog.start()

    def close(self) -> None:
        """As torchtitan's; signals get their former meaning."""
        self.watchdog.close()
        self.preemption.close()
        super().close()

    def report(self) -> str:
        """Where the results lie and what to do next, for the user."""
        folder = Path(self.config.dump_folder)
        lines = [f"Trained {self.step} steps."]
        checkpoint = self.checkpointer.newest()
        if checkpoint is not None:
            lines.append(f"  checkpoint   {checkpoint}")
        lines += [f"  loss curve   {folder / 'loss.png'}", f"  metrics      {folder / 'metrics.jsonl'}"]
        if self.config.metrics.enable_tensorboard:
            lines.append(f"  TensorBoard  tensorboard --logdir {folder / self.config.metrics.save_tb_folder}")
        if checkpoint is not None:
            lines.append(f"Next: mula-titan export {checkpoint} {folder / 'hf'}   (Hugging Face safetensors)")
        return "\n".join(lines)
