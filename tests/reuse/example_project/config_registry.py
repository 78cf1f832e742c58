"""Run it: ``python -m torchtitan.train --module example_project --config tiny --dataloader.dataset_path DATA``."""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from mula_titan import model_registry  # importing it lets torchtitan run on a CPU
from mula_titan.components.optimizer import AdamWContainer
from mula_titan.data.loader import TokenDataLoader


def tiny() -> Trainer.Config:
    """A small Mixture-of-Experts model, balanced by expert bias: torchtitan's trainer has no router losses."""
    return Trainer.Config(
        model_spec=model_registry(
            "mula_debug", dim=32, n_layers=2, ffn_dim=32, load_balance_loss=0.0, expert_bias_rate=1e-3
        ),
        hf_assets_path="assets/tokenizer",
        dataloader=TokenDataLoader.Config(),
        optimizer=AdamWContainer.Config(lr=1e-2, weight_decay=0.1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, seq_len=64, steps=20, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=20, last_save_model_only=False),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(),
        debug=DebugConfig(seed=42, enable_structured_logging=False),
    )
