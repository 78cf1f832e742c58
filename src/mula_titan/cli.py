"""Command line: ``mula-titan train | check | plan | preflight | launch | tokenize | export | import``."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

COMMANDS: dict[str, str] = {
    "train": "train a model on this node's devices (several nodes: NNODES, NODE_RANK, RDZV_ENDPOINT)",
    "check": "say whether a configuration can run, and print it in full",
    "plan": "say whether a configuration fits a machine, how fast it is, and which layout is better",
    "preflight": "check devices and links, write the list of good hosts",
    "launch": "train on the good nodes of an allocation, and start again without bad ones",
    "tokenize": "turn text into memory-mapped token shards",
    "export": "write a checkpoint as Hugging Face safetensors",
    "import": "turn a Hugging Face model folder into a checkpoint",
}


def _ranks_from_environment() -> int:
    text = os.environ.get("NGPU", "2")
    if not text.isdecimal():
        raise ValueError(f"NGPU={text!r}: expected the number of ranks on this node")
    return int(text)


@dataclass(kw_only=True)
class RankOptions:
    """Processes of a run."""

    nproc: int = field(default_factory=_ranks_from_environment)
    """Ranks on this node, one for each device. Default: NGPU, or 2."""

    nnodes: str = field(default_factory=lambda: os.environ.get("NNODES", "1"))
    """Nodes, or MIN:MAX for an elastic job."""

    rdzv_endpoint: str = field(default_factory=lambda: os.environ.get("RDZV_ENDPOINT", "localhost:0"))
    """host:port of the node where the ranks meet."""

    @property
    def world_size(self) -> int:
        """Ranks of the largest job that these options allow.

        Raises:
            ValueError: no ranks, or nodes that are no number.
        """
        if self.nproc < 1:
            raise ValueError(f"--nproc {self.nproc}: must be at least 1")
        if not all(part.isdecimal() and int(part) for part in self.nnodes.split(":")):
            raise ValueError(f"--nnodes {self.nnodes}: expected a number of nodes, or MIN:MAX")
        return self.nproc * int(self.nnodes.split(":")[-1])

    def ranks(self) -> dict[str, Any]:
        """Arguments of :func:`mula_titan.launch.run_ranks`."""
        return {"nproc": self.nproc, "nnodes": self.nnodes, "rdzv_endpoint": self.rdzv_endpoint}


@dataclass(kw_only=True)
class LaunchOptions(RankOptions):
    """Processes of a run; all other flags are configuration keys: --section.key value."""

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file, for example train_configs/mula_debug.toml."""


def main() -> None:
    """Entry point of ``mula-titan``."""
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if command not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("usage: mula-titan COMMAND ...  (mula-titan COMMAND --help)\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()))
        sys.exit(0 if command in ("-h", "--help") else f"\nmula-titan: unknown command {command!r}")
    try:
        {
            "train": _train,
            "check": _check,
            "plan": _plan,
            "preflight": _preflight,
            "launch": _launch,
            "tokenize": _tokenize,
            "export": _export,
            "import": _import,
        }[command](arguments)
    except (ValueError, FileNotFoundError, FileExistsError, PermissionError) as error:
        sys.exit(f"mula-titan {command}: {error}")


def _parsed(command: str, options_class: type, arguments: list[str]) -> tuple[Any, list[str]]:
    """A command's own options, and the words that are left: configuration keys."""
    return tyro.cli(
        options_class,
        prog=f"mula-titan {command}",
        description=COMMANDS[command],
        args=arguments,
        return_unknown_args=True,
    )


def _loaded(options: LaunchOptions, flags: list[str]) -> Any:
    from mula_titan.runtime.logs import set_up_logging
    from mula_titan.toml_config import load_config
    from mula_titan.validate import validate

    set_up_logging()
    config, values = load_config(options.config, flags)
    validate(config, values, options.world_size)
    return config


def _train(arguments: list[str]) -> None:
    options, flags = _parsed("train", LaunchOptions, arguments)
    _loaded(options, flags)  # one message here instead of one from every rank
    from mula_titan.launch import run_ranks

    sys.exit(run_ranks(["-m", "mula_titan.train", str(options.config), *flags], **options.ranks()))


def _preflight(arguments: list[str]) -> None:
    from mula_titan.launch import run_ranks
    from mula_titan.preflight import PreflightOptions

    options, words = _parsed("preflight", RankOptions, arguments)
    tyro.cli(PreflightOptions, prog="mula-titan preflight", args=words)  # one message for wrong flags
    sys.exit(run_ranks(["-m", "mula_titan.preflight", *words], **options.ranks()))


def _launch(arguments: list[str]) -> None:
    from mula_titan.launch import JobOptions, launch
    from mula_titan.toml_config import load_config
    from mula_titan.validate import validate

    options, flags = _parsed("launch", JobOptions, arguments)
    validate(*load_config(options.config, flags), options.nodes * options.nproc)
    sys.exit(launch(options, flags))


def _check(arguments: list[str]) -> None:
    config = _loaded(*_parsed("check", LaunchOptions, arguments))
    Console().print_json(data=config.to_dict())


def _plan(arguments: list[str]) -> None:
    from mula_titan.planner.plan import PlanOptions, plan

    options, flags = _parsed("plan", PlanOptions, arguments)
    plan(options, flags)


def _tokenize(arguments: list[str]) -> None:
    from mula_titan.data.tokenize import TokenizeOptions, tokenize

    _run("tokenize", TokenizeOptions, tokenize, arguments)


def _export(arguments: list[str]) -> None:
    from mula_titan.hf.export import ExportOptions, export

    _run("export", ExportOptions, export, arguments)


def _import(arguments: list[str]) -> None:
    from mula_titan.hf.import_ import ImportOptions, import_checkpoint

    _run("import", ImportOptions, import_checkpoint, arguments)


def _run(command: str, options_class: type, function: Callable[[Any], Path], arguments: list[str]) -> None:
    options: Any = tyro.cli(options_class, prog=f"mula-titan {command}", description=COMMANDS[command], args=arguments)
    print(function(options))


if __name__ == "__main__":
    main()
