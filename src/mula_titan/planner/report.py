"""What a plan says, for the terminal, as a picture and as one HTML page."""

import base64
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mula_titan.planner.communication import Traffic
from mula_titan.planner.hardware import Hardware
from mula_titan.planner.memory import RankMemory
from mula_titan.planner.search import Plan

GB = 1e9
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#b0b0b0", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")


def memory_table(ranks: list[RankMemory], hardware: Hardware) -> Table:
    """Memory by pipeline rank, in 1e9 bytes."""
    table = Table(title=f"Memory a rank, GB; tensors can have {hardware.usable_bytes / GB:.1f}", title_justify="left")
    for name in ("stage", *ranks[0].kinds(), "in flight", "peak"):
        table.add_column(name, justify="right")
    for rank in ranks:
        style = "red" if rank.peak > hardware.usable_bytes else None
        values = [f"{value / GB:.2f}" for value in rank.kinds().values()]
        table.add_row(str(rank.pp_rank), *values, str(rank.in_flight), f"{rank.peak / GB:.2f}", style=style)
    return table


def traffic_table(traffic: list[Traffic]) -> Table:
    """Messages of a step."""
    table = Table(title="Messages of a step, the rank of the fullest stage", title_justify="left")
    for name in ("for", "collective", "group", "ranks", "a node", "link", "GB", "count", "ms alone"):
        table.add_column(name, justify="left" if name in ("for", "collective", "group", "link") else "right")
    for t in traffic:
        group = t.group
        sizes = [str(group.size), str(group.per_node), group.link, f"{t.bytes / GB:.3f}", f"{t.count:.0f}"]
        table.add_row(t.purpose, t.kind, group.axis, *sizes, f"{1e3 * t.seconds:.1f}")
    return table


def time_table(plan: Plan) -> Table:
    """Where the step's time goes."""
    time = plan.time
    table = Table(title="Step time", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, seconds in time.parts.items():
        table.add_row(name, f"{1e3 * seconds:.1f}")
    table.add_section()
    table.add_row("step", f"{1e3 * time.seconds:.1f}")
    table.add_row("data messages beside compute", f"{1e3 * time.hidden_data:.1f}")
    table.add_row("pipeline bubble", f"{100 * time.bubble:.1f} %")
    table.add_row("tokens/s, all ranks", f"{time.tokens_per_second:,.0f}")
    table.add_row("tokens/s a rank", f"{time.tokens_per_second / plan.layout.world_size:,.0f}")
    table.add_row("MFU", f"{100 * time.mfu:.1f} %")
    return table


def scaling_table(curve: list[tuple[int, Plan]]) -> Table:
    """Tokens a second and efficiency as data ranks are added."""
    table = Table(title="Scaling: more data ranks, the same work on each", title_justify="left")
    for name in ("ranks", "step ms", "tokens/s", "efficiency"):
        table.add_column(name, justify="right")
    first = curve[0][1].time.tokens_per_second / curve[0][0]
    for ranks, plan in curve:
        rate = plan.time.tokens_per_second
        table.add_row(str(ranks), f"{1e3 * plan.time.seconds:.1f}", f"{rate:,.0f}", f"{rate / ranks / first:.3f}")
    return table


def search_table(plans: list[Plan], hardware: Hardware) -> Table:
    """Layouts, fastest first."""
    table = Table(title="Layouts that fit, fastest first", title_justify="left")
    for name in ("tokens/s", "step ms", "MFU", "bubble", "peak GB", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for plan in plans:
        time = plan.time
        numbers = [f"{time.tokens_per_second:,.0f}", f"{1e3 * time.seconds:.0f}", f"{100 * time.mfu:.1f} %"]
        numbers += [f"{100 * time.bubble:.0f} %", f"{plan.memory.peak / GB:.1f}"]
        table.add_row(*numbers, plan.layout.described())
    return table


def draw(
    plan: Plan,
    ranks: list[RankMemory],
    traffic: list[Traffic],
    curve: list[tuple[int, Plan]],
    hardware: Hardware,
    path: Path,
) -> None:
    """A PNG with memory, time, messages and scaling."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((memory, time), (messages, scaling)) = plt.subplots(2, 2, figsize=(13, 8))
    _stack(memory, [str(r.pp_rank) for r in ranks], [r.kinds() for r in ranks], GB)
    memory.axhline(hardware.usable_bytes / GB, color="black", linestyle="--", linewidth=0.8)
    top = 1.35 * max(hardware.usable_bytes, *(r.peak for r in ranks)) / GB
    memory.set(title="memory a rank, GB (dashed: available)", xlabel="pipeline rank", ylim=(0, top))
    _stack(time, ["step"], [plan.time.parts], 1e-3)
    time.set(title=f"step time, ms: {1e3 * plan.time.seconds:.0f}", xlim=(-0.6, 2.2))
    names = [f"{t.purpose}: {t.kind} over {t.group.axis}" for t in traffic]
    messages.barh(names, [t.bytes / GB for t in traffic], color=COLORS[0])
    messages.invert_yaxis()
    messages.set(title="messages of a step, GB")
    first = curve[0][1].time.tokens_per_second / curve[0][0]
    scaling.plot([n for n, _ in curve], [p.time.tokens_per_second / n / first for n, p in curve], marker="o")
    scaling.set(title="efficiency, the same work a rank", xlabel="ranks", xscale="log", ylim=(0, 1.05))
    figure.suptitle(
        f"{plan.layout.args.flavor} on {plan.layout.world_size} ranks of {hardware.name}\n{plan.layout.described()}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _stack(axis: Any, labels: list[str], columns: list[dict[str, float]], unit: float) -> None:
    bottom = [0.0] * len(labels)
    for name, color in zip(columns[0], COLORS, strict=False):
        values = [column[name] / unit for column in columns]
        axis.bar(labels, values, bottom=bottom, color=color, label=name)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axis.legend(fontsize=7, loc="upper right", ncols=1 if len(columns[0]) > 6 else 3)


def write_html(console: Console, picture: Path, path: Path) -> None:
    """What a recording console printed, and the picture, as one page without other files."""
    image = base64.b64encode(picture.read_bytes()).decode()
    page = console.export_html(inline_styles=True)
    tag = f'<img alt="memory, time, messages, scaling" style="max-width: 100%" src="data:image/png;base64,{image}">'
    path.write_text(page.replace("</body>", f"{tag}\n</body>"), encoding="utf-8")
