"""Hardware files, curves and collectives."""

import pytest

from mula_titan.planner.hardware import FOLDER, SHIPPED, load_hardware, share
from mula_titan.planner.layout import Group, Layout
from tests.planner.cases import make_config

AURORA = load_hardware("aurora_pvc")


def test_every_shipped_number_has_a_source() -> None:
    assert SHIPPED == ("aurora_pvc", "h200")
    for name in SHIPPED:
        hardware = load_hardware(name)
        assert len(hardware.sources) == 13 and all(len(source) > 4 for source in hardware.sources.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[fused]", "[fusde]"), "lacks fused"),
        (('source = "HGX H200"', ""), r"\[ranks_per_node\] needs value and source"),
        (("value = 788.0", 'value = "fast"'), "peak_tflops = 'fast': expected numbers"),
        (('device = "cuda"', 'device = "tpu"'), "'cuda', 'xpu', 'cpu'"),
    ],
)
def test_bad_files_are_refused(tmp_path, change, message) -> None:
    text = (FOLDER / "h200.toml").read_text()
    assert change[0] in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=message):
        load_hardware(str(path))
    with pytest.raises(ValueError, match="aurora_pvc, h200"):
        load_hardware("h100")


def test_curves_are_linear_in_the_logarithm() -> None:
    curve = ((512.0, 0.6), (2048.0, 0.8))
    assert share(curve, 1024) == pytest.approx(0.7)
    assert (share(curve, 256), share(curve, 9999)) == (0.3, 0.8)


def test_a_gather_inside_a_node_and_between_nodes() -> None:
    node, network = 113e9, 160e9 / 12
    inside = Group(axis="ep", size=12, per_node=12)
    assert AURORA.collective("all_gather", 12e9, inside) == pytest.approx(11e9 / node + 11 * 10e-6)
    # One rank a node: all 12 rings share the node's ports.
    across = Group(axis="expert_data", size=32, per_node=1)
    assert AURORA.collective("reduce_scatter", 1e9, across, 2) == pytest.approx(1e9 * 31 / 32 / network + 62 * 15e-6)
    # The whole stage: a twelfth crosses the network on each rank.
    both = Group(axis="stage", size=384, per_node=12)
    local, remote = 1e9 * 11 / 12 / node, 1e9 / 12 * 31 / 32 / network
    steps = 11 * 10e-6 + 31 * 15e-6
    assert AURORA.collective("all_gather", 1e9, both) == pytest.approx(local + remote + steps)
    assert AURORA.collective("all_reduce", 1e9, both) == pytest.approx(2 * (local + remote + steps))
    alone = Group(axis="ep", size=1, per_node=1)
    assert AURORA.collective("all_reduce", 1e9, alone) == 0


def test_rank_order_decides_the_links() -> None:
    config = make_config(
        "mula_220b_a10b",
        parallelism__pipeline_parallel_degree=8,
        parallelism__expert_parallel_degree=12,
        training__local_batch_size=8,
    )
    layout = Layout.from_config(config, 3072, "xpu")

    def shape(axis: str, ranks_per_node: int = 12) -> tuple[int, int, str]:
        group = layout.group(axis, ranks_per_node)
        return group.size, group.per_node, group.link

    assert shape("ep") == (12, 12, "node")
    assert shape("expert_data") == (32, 1, "network")
    assert shape("stage") == (384, 12, "both")
    assert shape("pp") == (8, 1, "network")
    assert shape("ep", 8) == (12, 4, "both")  # 12 ranks don't divide over nodes of 8
    assert layout.changed(tp=4, ep=4).group("fsdp", 12).per_node == 3
