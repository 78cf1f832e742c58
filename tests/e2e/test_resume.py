"""The program as a user runs it: killed at any moment and started again, it computes what it would have computed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.training import write_tokens

STEPS = 9
INTERVAL = 3


def _command(folder: Path, tokens: str, *flags: str) -> list[str]:
    values = {
        "dump_folder": folder,
        "hf_assets_path": "assets/tokenizer",
        "dataloader.sources": f'[{{path = "{tokens}", eos_id = 0}}]',
        "validator.enable": False,
        "model.dim": 32,
        "model.n_layers": 2,
        "model.ffn_dim": 32,
        "model.vocab_size": 96,
        "model.expert_bias_rate": 0.01,
        "training.seq_len": 16,
        "training.local_batch_size": 2,
        "training.global_batch_size": 8,
        "training.steps": STEPS,
        "checkpoint.interval": INTERVAL,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": False,
    }
    words = [word for key, value in values.items() for word in (f"--{key}", "false" if value is False else str(value))]
    config = folder.parent / "config.toml"
    lines = Path("train_configs/mula_debug.toml").read_text().splitlines()
    # The bundled data set's path must not stand beside sources.
    config.write_text("\n".join(line for line in lines if not line.startswith("dataset_path")))
    return [sys.executable, "-m", "mula_titan.cli", "train", str(config), "--nproc", "2", *words, *flags]


def _losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def _kill_after(command: list[str], folder: Path, step: int) -> None:
    """Start, wait for a step's record, then kill -9 the whole process group."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while max(_losses(folder), default=0) < step:
            assert process.poll() is None, f"ended with {process.returncode} before step {step}"
            assert time.monotonic() < deadline, f"step {step} not reached"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, float], str]:
    root = tmp_path_factory.mktemp("unbroken")
    tokens = write_tokens(root)
    done = subprocess.run(_command(root / "run", tokens), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = _losses(root / "run")
    assert list(losses) == list(range(1, STEPS + 1))
    return tokens, losses, done.stdout


def test_the_report_names_what_exists(unbroken: tuple[str, dict[int, float], str]) -> None:
    report = unbroken[2]
    paths = {line.split()[0]: Path(line.split()[-1]) for line in report.splitlines() if line.startswith("  ")}
    assert paths["checkpoint"].name == f"step-{STEPS}"
    assert (paths["checkpoint"] / ".metadata").is_file()
    assert paths["loss"].read_bytes().startswith(b"\x89PNG")
    assert f"mula-titan export {paths['checkpoint']}" in report


def test_killed_twice_and_resumed_equals_unbroken_to_the_bit(
    unbroken: tuple[str, dict[int, float], str], tmp_path: Path
) -> None:
    tokens, want, _ = unbroken
    folder = tmp_path / "run"
    command = _command(folder, tokens)
    _kill_after(command, folder, step=INTERVAL + 1)
    _kill_after(command, folder, step=2 * INTERVAL + 1)
    first = min(_losses(folder))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert first == 1
    assert _losses(folder) == want


def test_a_bad_configuration_is_one_message_and_exit_code(tmp_path: Path) -> None:
    command = _command(tmp_path / "run", "nowhere.npy", "--parallelism.expert_parallel_degree", "3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert [line for line in lines if "expert_parallel_degree = 3" in line and "command line" in line]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
