"""Logging of a training process: torchtitan's logger, without alarms that are false here."""

import logging
import os
import warnings

from torchtitan.tools.logging import init_logger, logger

FALSE_ALARMS = (
    "initial_load_model_only=True has no effect",  # torchtitan's own default
    "Setting validation steps to -1 might cause hangs",  # our loader ends on all ranks at once
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # set by torchrun, replaced by torchtitan
)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(text in message for text in FALSE_ALARMS)


def set_up_logging() -> None:
    """Log torchtitan's way on the ranks in ``LOG_RANK`` (default 0), warnings and errors on the others."""
    init_logger()
    logger.addFilter(_is_news)
    if os.environ.get("RANK", "0") not in os.environ.get("LOG_RANK", "0").split(","):
        logger.setLevel(logging.WARNING)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # Initial weights don't come from DTensor's random stream (model/init.py), so its CPU support doesn't matter.
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)")
