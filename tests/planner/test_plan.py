"""Step time, search and the command."""

from dataclasses import replace

import pytest

from mula_titan.cli import main
from mula_titan.planner.communication import step_traffic
from mula_titan.planner.hardware import load_hardware
from mula_titan.planner.layout import Layout
from mula_titan.planner.search import Planner
from mula_titan.planner.step_time import model_flops, step_time
from mula_titan.planner.warning import device_memory_warning, too_large
from tests.planner.cases import make_config

AURORA, H200 = load_hardware("aurora_pvc"), load_hardware("h200")


def paper_job(**changes):
    values = {
        "parallelism__pipeline_parallel_degree": 8,
        "parallelism__expert_parallel_degree": 12,
        "optimizer__sharding": "epso",
        "training__local_batch_size": 8,
        "training__seq_len": 2048,
        "model__document_mask": False,
    }
    return make_config("mula_220b_a10b", **(values | changes))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(paper_job(), AURORA)


def test_messages_of_a_step_by_hand(planner) -> None:
    layout = planner.layout(3072)
    traffic = {(t.purpose, t.kind, t.group.axis): t for t in step_traffic(planner.memory, layout, AURORA, 1)}
    experts = 9 * 3 * 20 * 3072 * 1536  # 9 layers on the second stage, 20 experts a rank
    gradients = traffic["gradients", "reduce_scatter", "expert_data"]
    assert gradients.bytes == pytest.approx(experts * 4, rel=1e-4) and gradients.group.link == "network"
    assert traffic["parameters", "all_gather", "expert_data"].bytes == pytest.approx(experts * 2, rel=1e-4)
    reduced = traffic["experts", "reduce_scatter", "ep"]
    # Forward, backward and recomputation, 9 layers, 8 micro-batches; tokens of 12 ranks in bf16.
    assert reduced.bytes == 3 * 9 * 8 * 12 * 2048 * 3072 * 2 and reduced.count == 3 * 9 * 8
    assert reduced.group.link == "node"
    assert traffic["pipeline", "send", "pp"].bytes == 2 * 8 * 2048 * 3072 * 2


def test_parts_add_up_and_flops_are_the_model_s(planner) -> None:
    layout = planner.layout(3072)
    time = planner.plan(layout).time
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.seconds == pytest.approx(time.pipeline + time.exposed_data + time.update)
    assert time.tokens_per_second == pytest.approx(3072 * 2048 / time.seconds)
    # Active parameters without the embedding: 6 FLOPs each; causal attention 6 L S H.
    block = 4 * 3072**2 + 8 * 3 * 3072 * 1536 + 240 * 3072
    assert model_flops(layout) == 6 * (64 * block + 50304 * 3072) + 6 * 64 * 3072 * 2048
    assert 0.45 < time.bubble < 0.50


def test_overlap_hides_messages_and_imbalance_slows_experts(planner) -> None:
    layout = planner.layout(384)
    shown = step_time(planner.memory, layout, AURORA, overlap=False)
    hidden = step_time(planner.memory, layout, AURORA)
    assert shown.exposed_data == pytest.approx(hidden.exposed_data + hidden.hidden_data)
    assert hidden.exposed_data < 0.8 * shown.exposed_data
    uneven = step_time(planner.memory, layout, AURORA, imbalance=2.0)
    assert uneven.block.experts == pytest.approx(2 * hidden.block.experts)
    assert uneven.block.expert_messages == hidden.block.expert_messages  # a gather moves all tokens anyway


def test_so_pays_for_what_epso_splits(planner) -> None:
    layout = planner.layout(3072)
    epso = step_time(planner.memory, layout, AURORA, overlap=False)
    so = step_time(planner.memory, layout.changed(sharding="so"), AURORA, overlap=False)
    assert so.exposed_data > 1.05 * epso.exposed_data
    assert so.update == pytest.approx(epso.update * 1.123, rel=0.02)  # docs/optimizer.md: 1.085 / 0.966 GB of states


def small(**changes):
    values = {"training__seq_len": 128, "training__local_batch_size": 8, "training__global_batch_size": 64}
    return make_config(**(values | changes))


def test_the_search_finds_what_trying_all_finds() -> None:
    planner = Planner(small(), H200)
    found, number = planner.search(8, keep=5)
    everything = []
    for layout in planner.candidates(8):
        try:
            plan = planner.plan(layout)
        except ValueError:
            continue
        if plan.fits(H200):
            everything.append(plan.time.seconds)
    assert number >= len(everything) > 50
    assert [p.time.seconds for p in found] == pytest.approx(sorted(everything)[:5])
    assert all(p.layout.tokens_per_step == 64 * 128 for p in found)


def test_layouts_survive_their_flags() -> None:
    from mula_titan.toml_config import load_config

    planner = Planner(small(model__n_layers=8), H200)
    layouts = list(planner.candidates(8))
    assert {layout.stages_per_rank for layout in layouts} == {1, 2}
    for layout in layouts[::23]:
        flags = [word for pair in layout.flags().split(" --") for word in (f"--{pair.removeprefix('--')}").split(" ")]
        flags += ["--model.n_layers", "8", "--training.seq_len", "128", "--training.global_batch_size", "64"]
        flags += ["--model.load_balance_per_layer", "true"]
        config, _ = load_config("train_configs/mula_debug.toml", flags)
        again = Layout.from_config(config, 8, "cuda")
        assert again.described() == layout.described()


def test_the_command_prints_and_draws(tmp_path, capsys, monkeypatch) -> None:
    words = "plan train_configs/mula_debug.toml --world-size 8 --hardware h200 --search --top 3"
    monkeypatch.setattr("sys.argv", ["mula-titan", *words.split(), "--output", str(tmp_path)])
    main()
    text = capsys.readouterr().out
    assert "mula_debug on 8 ranks of NVIDIA H200" in text and "Fits." in text and "layouts looked at" in text
    page = (tmp_path / "plan.html").read_text()
    assert "data:image/png;base64," in page and "fastest first" in page and "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_refusals_name_the_nearest_layout(monkeypatch) -> None:
    def message(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["mula-titan", "plan", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        return str(stopped.value)

    text = message("train_configs/mula_debug.toml", "--world-size", "8", "--hardware", "h200",
                   "--parallelism.expert_parallel_degree", "3")  # fmt: skip
    assert "parallelism.expert_parallel_degree = 3" in text
    assert "The nearest layout that works" in text and "--parallelism.expert_parallel_degree" in text
    assert "must be at least 1" in message("train_configs/mula_debug.toml", "--world-size", "0", "--hardware", "h200")
    assert "no such file; shipped ones: aurora_pvc, h200" in message(
        "train_configs/mula_debug.toml", "--world-size", "2", "--hardware", "frontier"
    )


def test_what_does_not_fit_gets_a_remedy() -> None:
    config = small(optimizer__sharding="so")
    layout = Planner(config, H200).layout(8)
    needed = Planner(config, H200).plan(layout).memory.peak
    planner = Planner(config, replace(H200, memory_gb=0.9 * needed / 1e9, reserved=0.0))
    assert not planner.plan(layout).fits(planner.hardware)
    nearest = planner.nearest(8, layout)
    assert nearest is not None and nearest.memory.peak <= 0.9 * needed
    assert (nearest.layout.pp, nearest.layout.ep, nearest.layout.tp) == (layout.pp, layout.ep, layout.tp)  # no detours
    hopeless = Planner(config, replace(H200, memory_gb=1e-3))
    assert hopeless.nearest(8, layout) is None


def test_a_run_that_will_not_fit_is_warned() -> None:
    config = small()
    peak = Planner(config, H200).plan(Layout.from_config(config, 8, "cuda")).memory.peak
    assert too_large(config, 8, "cuda", peak) is None
    text = too_large(config, 8, "cuda", 0.5 * peak)
    assert text is not None and "--world-size 8 --search" in text and f"needs about {peak / 1e9:.0f} GB" in text
    assert device_memory_warning(config, 8) is None  # a CPU's memory is no limit that we know
