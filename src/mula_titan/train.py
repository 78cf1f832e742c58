"""Training process of one rank: ``torchrun -m mula_titan.train CONFIG.toml [--section.key value ...]``."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.observability import structured_logger

from mula_titan.runtime.logs import set_up_logging
from mula_titan.toml_config import ConfigError, load_config
from mula_titan.validate import validate

EXIT_CONFIG = 2
"""Exit code for a configuration that cannot work."""


@record
def main(argv: list[str] | None = None) -> None:
    """Load and check the configuration, train, report.

    Args:
        argv: the TOML file (may be left out) and flags; the process's arguments by default.
    """
    set_up_logging()
    words = sys.argv[1:] if argv is None else argv
    path = Path(words[0]) if words and not words[0].startswith("--") else None
    try:
        config, values = load_config(path, words[1:] if path else words)
        validate(config, values, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"mula-titan: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)

    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = None
    try:
        trainer = config.build()
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    if dist.get_rank() == 0:
        print(trainer.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
