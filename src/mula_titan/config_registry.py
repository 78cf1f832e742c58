"""One function a model: the classes of its run's components. A TOML file overlays values on them.

Used by ``mula-titan train FILE.toml``, and by torchtitan itself: ``--module mula_titan --config mula_7b_a1b``.
"""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

from mula_titan.components.activation_checkpoint import FullAC
from mula_titan.components.validation import MulaValidator
from mula_titan.data.loader import TokenDataLoader
from mula_titan.model.args import make_args
from mula_titan.trainer import MulaTrainer


def _run(flavor: str, **sections) -> MulaTrainer.Config:
    """Components and values that all runs share."""
    defaults = {
        "model": make_args(flavor),
        "dump_folder": f"./outputs/{flavor}",
        "debug": DebugConfig(seed=42, enable_structured_logging=False),
        # spmd_types, torchtitan's default, fails on gloo with expert parallelism.
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor"),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2500, decay_type="cosine", min_lr_factor=0.1),
        "validator": MulaValidator.Config(
            dataloader=TokenDataLoader.Config(shuffle=False, infinite=False, drop_last=False)
        ),
        "activation_checkpoint": None,
        "loss": CrossEntropyLoss.Config(),
    }
    return MulaTrainer.Config(**(defaults | sections))


def mula_debug() -> MulaTrainer.Config:
    """A Mixture-of-Experts model of 2.4 M parameters for a CPU."""
    return _run("mula_debug", hf_assets_path="./assets/tokenizer", training=_cpu_training())


def mula_debug_dense() -> MulaTrainer.Config:
    """A dense model of 1.4 M parameters for a CPU."""
    return _run("mula_debug_dense", hf_assets_path="./assets/tokenizer", training=_cpu_training())


def mula_1b() -> MulaTrainer.Config:
    """Mula-1B, dense, OLMo architecture."""
    return _accelerator_run("mula_1b")


def mula_7b_a1b() -> MulaTrainer.Config:
    """Mula-7B-A1B, OLMoE architecture."""
    return _accelerator_run("mula_7b_a1b")


def mula_20b_a2b() -> MulaTrainer.Config:
    """Mula-20B-A2B."""
    return _accelerator_run("mula_20b_a2b")


def mula_100b_a7b() -> MulaTrainer.Config:
    """Mula-100B-A7B."""
    return _accelerator_run("mula_100b_a7b", activation_checkpoint=FullAC.Config())


def mula_220b_a10b() -> MulaTrainer.Config:
    """Mula-220B-A10B."""
    return _accelerator_run("mula_220b_a10b", activation_checkpoint=FullAC.Config())


def _cpu_training() -> TrainingConfig:
    return TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True)


def _accelerator_run(flavor: str, **sections) -> MulaTrainer.Config:
    """bf16 compute on fp32 weights, compiled blocks, and the cross-entropy in chunks of the vocabulary projection."""
    defaults = {
        "training": TrainingConfig(disable_cuda_graphs=True),
        "compile": CompileConfig(enable=True),
        "loss": ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
    }
    return _run(flavor, **(defaults | sections))
