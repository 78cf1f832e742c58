"""``mula-titan plan``: does a configuration fit a machine, how fast is it, and which layout is better."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress

from mula_titan.planner.communication import step_traffic
from mula_titan.planner.hardware import load_hardware
from mula_titan.planner.layout import Layout
from mula_titan.planner.report import (
    GB,
    draw,
    memory_table,
    scaling_table,
    search_table,
    time_table,
    traffic_table,
    write_html,
)
from mula_titan.planner.search import Plan, Planner
from mula_titan.toml_config import load_config


@dataclass(kw_only=True)
class PlanOptions:
    """What to plan; all other flags are configuration keys: --section.key value."""

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file, for example train_configs/mula_220b_a10b.toml."""

    world_size: int
    """Ranks of the job."""

    hardware: str
    """A machine: aurora_pvc, h200, or a TOML file like those."""

    search: bool = False
    """Rank all layouts by predicted tokens/s."""

    top: int = 10
    """Layouts that --search shows."""

    imbalance: float = 1.0
    """Rows of the busiest expert rank over the mean."""

    output: Path | None = None
    """Folder for plan.png and plan.html."""


def plan(options: PlanOptions, flags: list[str]) -> None:
    """Print, and draw if asked for.

    Raises:
        ValueError: a configuration that cannot run on so many ranks, with the nearest layout that can.
    """
    from mula_titan.validate import validate

    if options.world_size < 1:
        raise ValueError(f"--world-size {options.world_size}: must be at least 1")
    if options.top < 1:
        raise ValueError(f"--top {options.top}: must be at least 1")
    hardware = load_hardware(options.hardware)
    config, values = load_config(options.config, flags)
    planner = Planner(config, hardware, imbalance=options.imbalance)
    world = options.world_size
    console = Console(record=True, width=max(120, Console().width))
    refused: ValueError | None = None
    try:
        validate(config, values, world, paths=False)
        own = planner.plan(planner.layout(world))
    except ValueError as error:
        refused = error
    if refused is not None and not options.search:
        raise ValueError(f"{refused}\n{_remedy(planner, world)}") from None
    if refused is None:
        _show(console, planner, own)
    else:
        console.print(f"[red]The configuration's own layout cannot run:[/red] {refused}")
    if options.search:
        own = _search(console, planner, world, options.top) or own
    if options.output is not None:
        _write(console, planner, own, options.output)


def _show(console: Console, planner: Planner, own: Plan) -> None:
    hardware, layout = planner.hardware, own.layout
    console.print(f"{layout.args.flavor} on {layout.world_size} ranks of {hardware.name}: {layout.described()}")
    console.print(memory_table([planner.memory.rank(layout, r) for r in range(layout.pp)], hardware))
    fits = own.fits(hardware)
    console.print("[green]Fits.[/green]" if fits else f"[red]Doesn't fit.[/red] {_remedy(planner, layout.world_size)}")
    if host := planner.memory.sharded(layout, own.memory.pp_rank)[0].host:
        console.print(f"In host memory: {host / GB:.1f} GB a rank. Its copies and update are not timed.")
    console.print(traffic_table(_traffic(planner, own)))
    console.print(time_table(own))
    console.print(scaling_table(scaling(planner, layout)))


def _search(console: Console, planner: Planner, world: int, top: int) -> Plan | None:
    with Progress(transient=True) as progress:
        task = progress.add_task("layouts", total=None)
        plans, number = planner.search(
            world, top, lambda done, total: progress.update(task, completed=done, total=total)
        )
    if not plans:
        console.print(f"[red]None of {number} layouts fits.[/red] Take more ranks, or a smaller model.")
        return None
    console.print(search_table(plans, planner.hardware))
    console.print(f"{number} layouts looked at. The fastest as flags:\n{plans[0].layout.flags()}")
    return plans[0]


def scaling(planner: Planner, layout: Layout) -> list[tuple[int, Plan]]:
    """Plans with an eighth to four times the data ranks, the same work on each."""
    curve = []
    for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4):
        shard, world = layout.dp_shard * factor, layout.world_size * factor
        if shard < 1 or shard % 1 or (shard * layout.cp * layout.tp) % layout.ep:
            continue
        try:
            curve.append((int(world), planner.plan(layout.changed(dp_shard=int(shard), world_size=int(world)))))
        except ValueError:  # FSDP cannot cut the experts so far
            continue
    return curve


def _traffic(planner: Planner, own: Plan) -> list[Any]:
    return step_traffic(planner.memory, own.layout, planner.hardware, own.memory.pp_rank, planner.imbalance)


def _remedy(planner: Planner, world: int) -> str:
    nearest = planner.nearest(world, planner.layout(world))
    if nearest is None:
        return f"No layout works on {world} ranks of {planner.hardware.name}: take more ranks, or a smaller model."
    return (
        f"The nearest layout that works ({nearest.memory.peak / GB:.1f} GB): {nearest.layout.described()}\n"
        f"{nearest.layout.flags()}"
    )


def _write(console: Console, planner: Planner, own: Plan, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    layout = own.layout
    ranks = [planner.memory.rank(layout, r) for r in range(layout.pp)]
    picture, page = folder / "plan.png", folder / "plan.html"
    draw(own, ranks, _traffic(planner, own), scaling(planner, layout), planner.hardware, picture)
    write_html(console, picture, page)
    console.print(f"{picture}\n{page}")
