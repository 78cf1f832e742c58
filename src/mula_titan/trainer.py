"""MulaTrainer: torchtitan's Trainer with the Mula models, router losses and a report at the end.

Shape suffixes: B = batch, L = sequence length.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from mula_titan.components.checkpoint import MulaCheckpointManager
from mula_titan.components.metrics import MulaMetricsProcessor
from mula_titan.components.optimizer import AdamWContainer
from mula_titan.data.loader import TokenDataLoader
from mula_titan.model.args import MulaArgs
from mula_titan.model.spec import model_spec


class MulaTrainer(Trainer):
    """Training loop of the Mula models; its order of work is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        model: MulaArgs = field(default_factory=MulaArgs)
        """Architecture; the model is built from it."""

        dataloader: TokenDataLoader.Config = field(default_factory=TokenDataLoader.Config)
        optimizer: AdamWContainer.Config = field(default_factory=AdamWContainer.Config)
        checkpoint: MulaCheckpointManager.Config = field(default_factory=MulaCheckpointManager.Config)
        metrics: MulaMetricsProcessor.Config = field(default_factory=MulaMetricsProcessor.Config)

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

    def __init__(self, config: Config):
        super().__init__(config)
        self.checkpointer.model_info = {"args": config.model, "hf_assets_path": config.hf_assets_path}
        self._global_valid_tokens: torch.Tensor | None = None
        self._data_ended = False
        self.metrics_processor.num_layers, self.metrics_processor.top_k = config.model.n_layers, config.model.top_k

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor) -> torch.Tensor:
        """As torchtitan's; the token count of the step is kept for the router losses of its micro-batches."""
        self._global_valid_tokens = self.metrics_processor.step_valid_tokens = global_valid_tokens
        return super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's; adds each token's share of the loss, ``(B, L)`` float32, for the router losses."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        assert self._global_valid_tokens is not None
        extra_kwargs["token_weights"] = (labels != IGNORE_INDEX).float() / self._global_valid_tokens
        return inputs, labels, extra_kwargs

    def train_step(self, data_iterator: Any) -> None:
        """One optimizer step; remembers whether the data ended."""
        try:
            super().train_step(data_iterator)
        except DataloaderExhaustedError:
            self._data_ended = True
            raise

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
            self.metrics_processor.start(self.step, self.config.training.steps)
        return super().should_continue_training()

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
