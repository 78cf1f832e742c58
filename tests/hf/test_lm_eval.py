import json
import os
import subprocess
import sys

from mula_titan.hf.export import ExportOptions, export

TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def test_lm_eval_scores_an_exported_model_as_we_do(saved, tmp_path):
    model, _, checkpoint = saved("moe", init_std=0.3)
    folder = export(ExportOptions(checkpoint=checkpoint, output=tmp_path / "hf", dtype="float32"))
    questions = ["It is a truth", "She was", "Mr. Darcy", "The ball at", "They had", "Her sister"]
    choices = [" universally acknowledged", " handsome, clever, and rich", " a"]
    expected = [_best_choice(model, folder, question, choices) for question in questions]
    # The answers make the accuracy that the model must reach: 4 of 6, by its own choices.
    answers = expected[:4] + [(choice + 1) % 3 for choice in expected[4:]]
    rows = [
        {"question": question, "choices": choices, "answer": answer}
        for question, answer in zip(questions, answers, strict=True)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "local.yaml").write_text(TASK.replace("DATA", str(tmp_path / "test.jsonl")))

    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args"]
    command += [
        f"pretrained={folder},dtype=float32",
        "--tasks",
        "local_choice",
        "--include_path",
        str(tmp_path / "task"),
    ]
    command += ["--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path / "scores")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    accuracy = json.loads(scores.read_text())["results"]["local_choice"]["acc,none"]
    assert accuracy == 4 / 6


def _best_choice(model, folder, question, choices):
    """Index of the continuation with the largest total log-probability under the native model."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, scores = tokenizer.encode(question).ids, []
    for choice in choices:
        whole = tokenizer.encode(question + choice).ids
        with torch.no_grad():
            logprobs = model(torch.tensor([whole[:-1]])).log_softmax(-1)[0]
        scores.append(sum(logprobs[i - 1, whole[i]].item() for i in range(len(start), len(whole))))
    return max(range(len(choices)), key=scores.__getitem__)
