"""Training process of one rank: ``torchrun -m mula_titan.train CONFIG.toml [--section.key value ...]``."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

from mula_titan.exit_codes import CONFIG, FatalFault
from mula_titan.runtime.logs import set_up_logging
from mula_titan.toml_config import ConfigError, load_config
from mula_titan.validate import validate


@record
def main(argv: list[str] | None = None) -> None:
    """Load and check the configuration, train, report.

    Args:
        argv: the TOML file (may be left out) and flags; the process's arguments by default.
    """
    set_up_logging()
    words = sys.argv[1:] if argv is None else argv
    path = Path(words[0]) if words and not words[0].startswith("--") else None
    is_first, world_size = os.environ.get("RANK", "0") == "0", int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config, values = load_config(path, words[1:] if path else words)
        validate(config, values, world_size)
    except ConfigError as error:
        if is_first:
            print(f"mula-titan: {error}", file=sys.stderr)
        sys.exit(CONFIG)

    if is_first:
        from mula_titan.planner.warning import device_memory_warning  # the other ranks need no planner

        if warning := device_memory_warning(config, world_size):
            logger.warning(warning)
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = None
    code = 0
    try:
        trainer = config.build()
        if config.replay.bundle:
            code = trainer.faulty_steps.replay_bundle()
        else:
            trainer.train()
    except FatalFault as fault:
        # All ranks raise it alike.
        code = fault.exit_code
        if dist.get_rank() == 0:
            print(f"mula-titan: {fault}", file=sys.stderr)
    finally:
        if trainer is not None:
            trainer.close()
    if code:
        sys.exit(code)
    if dist.get_rank() == 0 and trainer is not None and not config.replay.bundle:
        print(trainer.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
