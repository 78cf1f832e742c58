"""A machine as a TOML file: speeds, sizes and where each number comes from; and how long things take on it."""

import itertools
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import tomli

from mula_titan.planner.layout import Group

FOLDER = Path(__file__).parent
SHIPPED = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of the hardware files in this package."""

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, its node and its network. Every number has a ``source`` in the file."""

    name: str
    device: Literal["cuda", "xpu", "cpu"]
    memory_gb: float
    """Memory of a rank's device in 1e9 bytes."""
    reserved: float
    """Share of the memory that tensors cannot have."""
    ranks_per_node: int
    peak_tflops: float
    """bf16 matrix product that the shares below refer to, TFLOP/s."""
    matmul: Curve
    """Share of the peak by the smallest dimension of a product."""
    experts: Curve
    """Share of the peak of a whole expert layer by rows an expert."""
    attention: float
    """Share of the peak of causal attention."""
    memory_bandwidth_gbs: float
    """Device memory, 1e9 bytes a second, read and written together."""
    fused: float
    """Share of the memory traffic of all but matrix products that is left after torch.compile."""
    node_bandwidth_gbs: float
    """A rank's sending to others on its node, 1e9 bytes a second."""
    node_latency_us: float
    """A step of a collective inside a node."""
    network_bandwidth_gbs: float
    """A node's sending to other nodes, all its ranks together."""
    network_latency_us: float
    """A step of a collective between nodes."""
    sources: dict[str, str]

    @property
    def usable_bytes(self) -> float:
        """Bytes that a rank's tensors can have."""
        return self.memory_gb * 1e9 * (1 - self.reserved)

    # -- compute ------------------------------------------------------------------------------------------------------

    def product(self, flops: float, smallest_dim: float) -> float:
        """Seconds of dense matrix products."""
        return flops / (self.peak_tflops * 1e12 * share(self.matmul, smallest_dim))

    def expert_products(self, flops: float, rows_per_expert: float) -> float:
        """Seconds of an expert layer, index building, gather and combination included."""
        return flops / (self.peak_tflops * 1e12 * share(self.experts, rows_per_expert))

    def attention_products(self, flops: float) -> float:
        """Seconds of attention scores and values."""
        return flops / (self.peak_tflops * 1e12 * self.attention)

    def memory(self, size: float) -> float:
        """Seconds of reading and writing so many bytes."""
        return size / (self.memory_bandwidth_gbs * 1e9)

    # -- collectives --------------------------------------------------------------------------------------------------

    def collective(self, kind: str, size: float, group: Group, count: float = 1) -> float:
        """Seconds of collectives in which all ranks of the machine take part, each in its own group.

        A ring inside the nodes, then a ring between ranks of equal place on the nodes (both bandwidth-optimal:
        Thakur et al., IJHPCA 2005, sections 4.1 and 4.4); the ranks of a node share its network.

        Args:
            kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``.
            size: bytes that come out of a gather or go into a reduction; that a rank sends in the others; of all
                ``count`` collectives together.
            group: the ranks.
            count: collectives, each of which pays the latency.
        """
        if group.size == 1:
            return 0.0
        if kind == "all_reduce":
            parts = ("reduce_scatter", "all_gather")
            return sum(self.collective(part, size, group, count) for part in parts)
        inside, between = group.per_node, group.nodes
        node, network = self.node_bandwidth_gbs * 1e9, self.network_bandwidth_gbs * 1e9 / self.ranks_per_node
        if kind == "send":
            across = group.per_node < group.size
            latency = self.network_latency_us if across else self.node_latency_us
            return size / (network if across else node) + count * latency * 1e-6
        steps = (inside - 1) * self.node_latency_us + (between - 1) * self.network_latency_us
        if kind == "all_to_all":
            local = size * (inside - 1) / group.size / node
            return local + size * (group.size - inside) / group.size / network + count * steps * 1e-6
        local = size * (inside - 1) / inside / node
        remote = size / inside * (between - 1) / between / network
        return local + remote + count * steps * 1e-6


def share(curve: Curve, x: float) -> float:
    """A curve's value, linear in log x between its points; constant above, and in proportion to x below."""
    if x <= curve[0][0]:
        return curve[0][1] * x / curve[0][0]  # half the rows take as long: weights and tiles are the limit
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return curve[-1][1]


def load_hardware(name: str) -> Hardware:
    """Read a shipped file by name, or any file by path.

    Raises:
        ValueError: no such file; a key that is missing, unknown, or has no value or no source.
    """
    path = FOLDER / f"{name}.toml" if name in SHIPPED else Path(name)
    try:
        tree: dict[str, Any] = tomli.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"--hardware {name}: no such file; shipped ones: {', '.join(SHIPPED)}") from None
    except tomli.TOMLDecodeError as error:
        raise ValueError(f"--hardware {name}: not valid TOML: {error}") from None
    known = [field.name for field in fields(Hardware) if field.name != "sources"]
    plain = ("name", "device")
    for key in known:
        if key not in tree:
            raise ValueError(f"--hardware {name}: lacks {key}; copy {FOLDER / 'h200.toml'} and change its numbers")
    values, sources = {}, {}
    for key, entry in tree.items():
        if key not in known:
            raise ValueError(f"--hardware {name}: unknown key {key}; keys: {', '.join(known)}")
        if key in plain:
            values[key] = entry
            continue
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not entry["source"]:
            raise ValueError(f"--hardware {name}: [{key}] needs value and source: where the number comes from")
        value = entry["value"]
        is_curve = key in ("matmul", "experts")
        numbers = [n for pair in value for n in pair] if is_curve else [value]
        if not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise ValueError(f"--hardware {name}: {key} = {value!r}: expected {'pairs of ' if is_curve else ''}numbers")
        values[key] = tuple(sorted((float(x), float(y)) for x, y in value)) if is_curve else value
        sources[key] = entry["source"]
    if values["device"] not in ("cuda", "xpu", "cpu"):
        raise ValueError(f"--hardware {name}: device = {values['device']!r}: one of 'cuda', 'xpu', 'cpu'")
    return Hardware(**values, sources=sources)
