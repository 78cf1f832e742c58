"""Every configuration that cannot work is refused before a process group is made, in one message.

A message names the file or "command line", the key, its value and what to do.
"""

import os
import stat
from pathlib import Path

import pytest

from mula_titan import validate as validate_module
from mula_titan.toml_config import ConfigError, load_config
from tests.config.cases import Place

# (what is wrong, TOML, words of the message in their order)
SPELLING = [
    ("section", "[trainning]\nsteps = 5", ["unknown key trainning", "did you mean training?"]),
    ("key", "[training]\nstep = 5", ["unknown key training.step", "did you mean training.steps?"]),
    ("far off", "[compile]\nxyzzy = 5", ["unknown key compile.xyzzy", "keys there: enable, "]),
    (
        "nested",
        "[validator.dataloader]\ndatset_path = 'x'",
        ["unknown key validator.dataloader.datset_path", "did you mean validator.dataloader.dataset_path?"],
    ),
    (
        "list of tables",
        "[[dataloader.sources]]\npath = 'x'\nwieght = 2",
        ["unknown key wieght in dataloader.sources", "did you mean weight?"],
    ),
    (
        "list of tables, key left out",
        "[[optimizer.param_groups]]\noptimizer_name = 'AdamW'",
        ["optimizer.param_groups lacks pattern"],
    ),
    (
        "mode's keys",
        "[activation_checkpoint]\nmode = 'full'\nmemory_budget = 0.5",
        ["activation_checkpoint.memory_bud"],
    ),
    ("keys without a mode", "[activation_checkpoint]\nmode = 'none'\ndebug = true", ["sets debug", "mode is 'none'"]),
    ("internal", "model_spec = 'x'", ["unknown key model_spec"]),
    ("flavor", "model.flavor = 'mula_7b'", ["model.flavor = 'mula_7b'", "did you mean 'mula_7b_a1b'?"]),
    ("registry function", "config = 'zzz'", ["config = 'zzz'", "choose one of 'mula_debug', "]),
    ("module", "config = 'x'\nmodule = 'no_such_module'", ["module = 'no_such_module'", "no such Python module"]),
    ("module's type", "config = 'x'\nmodule = 5", ["module = 5", "expected the name of a Python module"]),
]

TYPES = [
    ("int for string", "checkpoint.folder = 5", ["checkpoint.folder = 5", "expected a string"]),
    ("string for bool", "[compile]\nenable = 'yes'", ["compile.enable = 'yes'", "expected true or false"]),
    ("bool for int", "[training]\nsteps = true", ["training.steps = True", "expected a whole number"]),
    ("float for int", "[training]\nsteps = 1.5", ["training.steps = 1.5", "expected a whole number"]),
    ("string for float", "[optimizer]\nlr = 'big'", ["optimizer.lr = 'big'", "expected a number"]),
    ("bool for float", "[optimizer]\nlr = true", ["optimizer.lr = True", "expected a number"]),
    ("string for int or none", "[debug]\nseed = 'x'", ["debug.seed = 'x'", 'expected a whole number or "none"']),
    ("int for list", "[compile]\ncomponents = 5", ["compile.components = 5", "expected a list"]),
    ("list of ints", "[compile]\ncomponents = [5]", ["compile.components = [5]", "expected a list of a string"]),
    ("value for section", "training = 5", ["training = 5", "this is a section; set [training] with keys"]),
    ("table for value", "[training.steps]\nx = 1", ["training.steps = {'x': 1}", "expected a whole number"]),
    ("list for table", "[optimizer]\noptimizer_factory_kwargs_by_name = []", ["expected a table"]),
    (
        "in a list of tables",
        "[[dataloader.sources]]\npath = 'x'\nweight = 'much'",
        ["dataloader.sources.weight = 'much'", "expected a number"],
    ),
    ("literal", "[training]\ndtype = 'fp8'", ["training.dtype = 'fp8'", "expected one of 'bfloat16', 'float32'"]),
    ("mode", "[activation_checkpoint]\nmode = 'ful'", ["activation_checkpoint.mode = 'ful'", "did you mean 'full'?"]),
]


@pytest.mark.parametrize(
    ("text", "words"), [case[1:] for case in SPELLING + TYPES], ids=[c[0] for c in SPELLING + TYPES]
)
def test_unknown_keys_and_wrong_types(place: Place, text: str, words: list[str]) -> None:
    message = place.refusal(text)
    assert message.startswith("run.toml: ")
    assert_in_order(message, words)


def assert_in_order(message: str, words: list[str]) -> None:
    at = 0
    for word in words:
        assert word in message[at:], f"{word!r} is not in {message[at:]!r}"
        at = message.index(word, at) + len(word)


RANGES = {
    "at least 1": [
        "training.local_batch_size = 0",
        "training.seq_len = 0",
        "training.steps = -1",
        "training.gc_freq = 0",
        "lr_scheduler.total_steps = 0",
        "profiler.profile_freq = 0",
        "profiler.memory_snapshot_freq = 0",
        "metrics.log_freq = 0",
        "validator.freq = 0",
        "comm.init_timeout_seconds = 0",
        "comm.train_timeout_seconds = 0",
        "parallelism.data_parallel_replicate_degree = 0",
        "parallelism.data_parallel_shard_degree = 0",
        "parallelism.data_parallel_shard_degree = -2",
        "parallelism.tensor_parallel_degree = 0",
        "parallelism.pipeline_parallel_degree = 0",
        "parallelism.context_parallel_degree = 0",
        "parallelism.expert_parallel_degree = 0",
        "parallelism.pipeline_parallel_layers_per_stage = 0",
        "training.global_batch_size = 0",
        "model.dim = 0",
        "model.n_layers = 0",
        "model.vocab_size = 0",
    ],
    "at least 0": [
        "lr_scheduler.warmup_steps = -1",
        "optimizer.weight_decay = -0.1",
        "optimizer.clip_after_step = -1",
        "optimizer.weight_decay = nan",
        "debug.seed = -1",
        "comm.trace_buf_size = -1",
    ],
    "at least -1": ["checkpoint.load_step = -2"],
    "must be positive": [
        "training.max_norm = 0.0",
        "optimizer.lr = 0.0",
        "optimizer.lr = nan",
        "optimizer.eps = 0.0",
        "optimizer.bucket_mib = 0.0",
        "model.norm_eps = 0.0",
        "model.init_std = -1.0",
        "model.rope_theta = 0.0",
    ],
    "must be finite": ["optimizer.lr = inf", "optimizer.weight_decay = inf"],
    "0..1": [
        "optimizer.beta1 = 1.5",
        "optimizer.beta2 = -0.1",
        "lr_scheduler.min_lr_factor = 2.0",
        "lr_scheduler.decay_ratio = 1.5",
    ],
    "must be below 1": ["optimizer.beta1 = 1.0", "optimizer.beta2 = 1.0"],
    "must be 0 (off) or positive": ["model.load_balance_loss = -0.1", "model.expert_bias_rate = nan"],
    "must lie in 1..num_experts (8)": ["model.top_k = 9", "model.top_k = 0"],
    "must divide model.dim (128)": ["model.n_heads = 3"],
    "must divide model.n_heads (4)": ["model.n_kv_heads = 3"],
    "at least profiler_warmup + profiler_active = 12": [
        "profiler.profile_freq = 5\nprofiler.enable_profiling = true\nprofiler.profiler_warmup = 11"
    ],
}


@pytest.mark.parametrize(("line", "words"), [(line, words) for words, lines in RANGES.items() for line in lines])
def test_values_out_of_range(place: Place, line: str, words: str) -> None:
    message = place.refusal(line)
    assert message.startswith(f"run.toml: {line.split(' = ')[0]} = ")
    assert words in message


# Values that a torchtitan class refuses: the message names file, section and reason.
CLASSES = [
    ("checkpoint.interval = 0", "[checkpoint]: Checkpoint interval needs to be at least 1"),
    ("checkpoint.keep_latest_k = 1", "[checkpoint]: We need to maintain at least 2"),
    ("checkpoint.keep_latest_k = -1", "[checkpoint]: keep_latest_k cannot be negative"),
    ("checkpoint.max_failed_saves = 0", "[checkpoint]: max_failed_saves = 0 must be at least 1"),
    ("checkpoint.model_only.interval = -1", "[checkpoint.model_only]: interval = -1 must be at least 0"),
    ("checkpoint.exclude_from_loading = ['model']", "[checkpoint]: model key shouldn't be"),
    ("validator.steps = 0", "[validator]: validation steps must be positive or -1"),
    ("dataloader.seed = -1", "[dataloader]: seed = -1 must be at least 0"),
    ("dataloader.epochs = 0", "[dataloader]: epochs = 0 must be at least 1"),
    ("dataloader.dataset = 'c4'", "[dataloader]: dataset = 'c4'"),
    ("dataloader.sources = [{path = 'x', weight = 0.0}]", "[dataloader]: source x: weight = 0.0 must be a positive"),
    ("dataloader.sources = [{path = 'x', weight = nan}]", "[dataloader]: source x: weight = nan must be a positive"),
    ("dataloader.sources = [{path = 'x', dtype = 'int7'}]", "[dataloader]: source x: dtype = 'int7' must be one of"),
    ("parallelism.pipeline_parallel_microbatch_size = 0", "pipeline_parallel_microbatch_size must be greater than 0"),
    ("debug.batch_invariant = true", "Batch-invariant mode is not supported"),
]


@pytest.mark.parametrize(("line", "words"), CLASSES)
def test_values_that_a_class_refuses(place: Place, line: str, words: str) -> None:
    message = place.refusal(line)
    assert "run.toml" in message
    assert words in message


FITS = [
    (
        "replicate",
        "parallelism.data_parallel_replicate_degree = 3",
        4,
        ["data_parallel_shard_degree", "must divide the 4"],
    ),
    (
        "product",
        "parallelism.data_parallel_shard_degree = 3",
        4,
        [
            "parallelism.data_parallel_shard_degree = 3",
            "product of degrees 3",
            "must equal the 4 ranks",
            "start 3 ranks",
        ],
    ),
    (
        "experts by EP",
        "parallelism.expert_parallel_degree = 3",
        3,
        ["parallelism.expert_parallel_degree = 3", "must divide model.num_experts (8)", "possible: 1, 2, 4, 8"],
    ),
    (
        "EP by ranks",
        "parallelism = {expert_parallel_degree = 4, data_parallel_replicate_degree = 3}",
        6,
        ["parallelism.expert_parallel_degree = 4", "must divide data_parallel_shard_degree x", "= 2"],
    ),
    (
        "sequence by TP",
        "parallelism.tensor_parallel_degree = 4\ntraining.seq_len = 126",
        4,
        ["training.seq_len = 126", "must be a multiple of 4"],
    ),
    (
        "heads by TP",
        "parallelism.tensor_parallel_degree = 8\ntraining.seq_len = 128",
        8,
        ["parallelism.tensor_parallel_degree = 8", "must divide model.n_heads (4)"],
    ),
    ("context", "training.seq_len = 8192", 1, ["training.seq_len = 8192", "exceeds model.max_seq_len (4096)"]),
    (
        "global batch",
        "training = {global_batch_size = 10, local_batch_size = 4}",
        2,
        ["training.global_batch_size = 10", "multiple of local_batch_size 4 x data-parallel ranks 2 = 8"],
    ),
    (
        "all layers' balance over a pipeline",
        "parallelism.pipeline_parallel_degree = 2\ntraining.local_batch_size = 2",
        2,
        ["model.load_balance_per_layer = False", "one pipeline stage", "set true"],
    ),
    (
        "stages",
        "model.load_balance_loss = 0.0\nparallelism.pipeline_parallel_degree = 8",
        8,
        ["parallelism.pipeline_parallel_degree = 8", "more stages than the model's 4 layers"],
    ),
    (
        "graphs over a pipeline",
        "model.load_balance_loss = 0.0\nparallelism.pipeline_parallel_degree = 2\ntraining.disable_cuda_graphs = false",
        2,
        ["[configuration]", "CUDA graph"],
    ),
    (
        "tied embeddings over a pipeline",
        "model = {tie_embeddings = true, load_balance_loss = 0.0}\nparallelism.pipeline_parallel_degree = 2",
        2,
        ["model.tie_embeddings = True", "different ranks; set false"],
    ),
    (
        "zero bubble with experts",
        "model.load_balance_loss = 0.0\n[parallelism]\npipeline_parallel_degree = 2\n"
        "pipeline_parallel_schedule = 'ZBVZeroBubble'",
        2,
        ["parallelism.pipeline_parallel_schedule = 'ZBVZeroBubble'", "use '1F1B'"],
    ),
    (
        "micro-batches of a pipeline",
        "model.load_balance_loss = 0.0\ntraining.local_batch_size = 1\nparallelism.pipeline_parallel_degree = 2",
        2,
        ["training.local_batch_size = 1"],
    ),
    (
        "bias in a Hugging Face checkpoint",
        "model.expert_bias_rate = 0.1\ncheckpoint = {last_save_in_hf = true, last_save_model_only = true}",
        1,
        ["checkpoint.last_save_in_hf = True", "mula-titan export"],
    ),
    (
        "backend",
        "parallelism.spmd_backend = 'spmd_types'",
        1,
        ["spmd_backend = 'spmd_types'", "need 'partial_dtensor'"],
    ),
    ("seed checkpoint", "checkpoint.create_seed_checkpoint = true", 1, ["create_seed_checkpoint = True", "set false"]),
    ("local tensor", "comm.mode = 'local_tensor'", 1, ["comm.mode = 'local_tensor'", "set 'default'"]),
    ("derived", "dataloader.vocab_size = 5", 1, ["dataloader.vocab_size", "follows from model.vocab_size"]),
    ("part", "checkpoint.exclude_from_loading = ['data']", 1, ["exclude_from_loading = ['data']", "dataloader"]),
]


@pytest.mark.parametrize(("text", "ranks", "words"), [case[1:] for case in FITS], ids=[case[0] for case in FITS])
def test_values_that_do_not_fit_each_other(place: Place, text: str, ranks: int, words: list[str]) -> None:
    if text.startswith("model = {"):
        text = text.replace("model = {", "model = {flavor = 'mula_debug', ")
    assert_in_order(place.refusal(text, ranks=ranks), words)


def test_the_last_word_is_blamed(place: Place) -> None:
    assert place.refusal("training.steps = 5", "--training.steps=0").startswith("command line: training.steps = 0: ")
    assert place.refusal("training.steps = 0", "--training.seq_len=64").startswith("run.toml: training.steps = 0: ")


def test_dense_model_has_no_experts(place: Place) -> None:
    message = place.refusal("parallelism.expert_parallel_degree = 2", ranks=2, flavor="mula_debug_dense")
    assert_in_order(message, ["run.toml: parallelism.expert_parallel_degree = 2", "mula_debug_dense is dense; set 1"])


def test_context_parallel_refusals(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "parallelism.context_parallel_degree = 2\ntraining.seq_len = 126"
    message = place.refusal(text, ranks=2)
    assert "no context-parallel attention for CPUs; set 1" in message
    monkeypatch.setattr(validate_module, "select_device", lambda: "cuda")
    message = place.refusal(text, ranks=2)
    assert "CPUs" not in message
    assert "training.seq_len = 126: must be a multiple of 4" in message
    assert "router losses would see a part of each sequence" in message
    assert "model.document_mask = True: context parallelism has no mask for sdpa" in message
    balanced = text.replace("126", "128") + "\nmodel.load_balance_loss = 0.0\nmodel.document_mask = false"
    assert place.load(balanced, ranks=2).parallelism.context_parallel_degree == 2


PATHS = [
    ("dataloader.dataset_path", "/nowhere/data", "no such file or folder; make it with `mula-titan tokenize`"),
    ("dataloader.dataset_path", "/nowhere/*.npy", "no such file or folder"),
    ("dataloader.dataset_path", "none", "set the folder that `mula-titan tokenize` wrote"),
    ("hf_assets_path", "/nowhere/tokenizer", "no such folder; it must hold the tokenizer's files"),
    ("hf_assets_path", "/", "no tokenizer in this folder"),
    ("checkpoint.initial_load_path", "/nowhere/step-1", "no such folder"),
]


@pytest.mark.parametrize(("key", "path", "words"), PATHS)
def test_missing_paths(place: Place, key: str, path: str, words: str) -> None:
    message = place.refusal("checkpoint.enable = true", f"--{key}={path}")
    value = None if path == "none" else path
    assert message.startswith(f"command line: {key} = {value!r}: ")
    assert words in message


def test_validation_data_must_exist_where_it_is_used(place: Place) -> None:
    flag = "--validator.dataloader.dataset_path=/nowhere"
    assert "validator.dataloader.dataset_path = '/nowhere'" in place.refusal("validator.enable = true", flag)
    place.load("validator.enable = false", flag)


def test_one_way_to_name_the_data(place: Place) -> None:
    message = place.refusal(f"dataloader.sources = [{{path = '{place.folder}'}}]")
    assert "set either this or dataloader.sources" in message
    message = place.refusal("dataloader.sources = [{path = '/nowhere/data'}]", "--dataloader.dataset_path=none")
    assert_in_order(message, ["run.toml: dataloader.sources", "/nowhere/data: no such file or folder"])


def test_output_folder_must_be_writable(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place.folder / "file"
    file.write_text("")
    message = place.refusal("", f"--dump_folder={file / 'out'}")
    assert_in_order(message, ["command line: dump_folder = ", "cannot be written", "file is not a writable folder"])
    locked = place.folder / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    # The superuser may write everywhere, so ask the permission bits.
    monkeypatch.setattr(validate_module.os, "access", lambda path, mode: bool(os.stat(path).st_mode & stat.S_IWUSR))
    assert "locked is not a writable folder" in place.refusal("", f"--dump_folder={locked / 'a' / 'b'}")


def test_missing_file_and_invalid_toml(place: Place) -> None:
    (place.folder / "other.toml").write_text("")
    with pytest.raises(ConfigError, match=r"runn\.toml: no such configuration file\. Files there: other\.toml\."):
        load_config(place.folder / "runn.toml")
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML: .*line 2"):
        place.load("[model]\nflavor = oops")


def test_no_model_named() -> None:
    with pytest.raises(ConfigError, match=r"command line: say which model to train: \[model\] flavor ="):
        load_config(None, ["--training.steps", "5"])


def test_a_word_that_is_no_flag(place: Place) -> None:
    assert "unexpected argument 'training.steps'" in place.refusal("", "training.steps", "5")


def test_all_problems_at_once(place: Place) -> None:
    text = "[training]\nstep = 5\ndtype = 'fp8'\n[optimizer]\nlr = 'x'"
    assert place.refusal(text, "--compile.enable=5").splitlines() == [
        "run.toml: optimizer.lr = 'x': expected a number",
        "run.toml: unknown key training.step: did you mean training.steps?",
        "run.toml: training.dtype = 'fp8': expected one of 'bfloat16', 'float32'",
        "command line: compile.enable = 5: expected true or false",
    ]
    lines = place.refusal("[training]\nsteps = 0\n[optimizer]\nlr = -1", "--metrics.log_freq=0").splitlines()
    assert sorted(line.split(":")[1].split()[0] for line in lines) == [
        "metrics.log_freq",
        "optimizer.lr",
        "training.steps",
    ]
    lines = place.refusal("[model]\nflavor = 'mula_debug'\ntop_k = 0\ninit_std = 0.0").splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["run.toml: model.top_k", "run.toml: model.init_std"]
    lines = place.refusal(
        "training.seq_len = 9000", "--hf_assets_path=/nowhere", "--dataloader.dataset_path=/no"
    ).splitlines()
    assert len(lines) == 3


def test_plain_torchtitan_config_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "plain_registry.py").write_text(
        "from torchtitan.trainer import Trainer\n\ndef plain():\n    return Trainer.Config()\n"
    )
    monkeypatch.syspath_prepend(place.folder)
    message = place.refusal("config = 'plain'\nmodule = 'plain_registry'")
    assert_in_order(message, ["run.toml: the registry function gives a Trainer.Config", "python -m torchtitan.train"])


def test_registry_that_fails_to_import_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Path = place.folder / "broken_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config_registry.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(place.folder)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        place.load("config = 'x'\nmodule = 'broken_project'")
