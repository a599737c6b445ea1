"""lm-eval on a model object and on a directory by name, without a network."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer

from longnet.model.hf import export_checkpoint
from tests.model.models import small_model

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
ROLLING = "metric_list: [{metric: bits_per_byte}]"
GENERATED = """
generation_kwargs: {max_gen_toks: 4, until: ["zzz"]}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"question": f"what is {n}?", "answer": "a number of things"}) for n in range(3))
    )
    for name, kind, rest in (
        ("local_rolling", "loglikelihood_rolling", ROLLING),
        ("local_generated", "generate_until", GENERATED),
    ):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, data=data, rest=rest))
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_it_drives_the_model_object(tasks: Any) -> None:
    from longnet.evaluation.harness import LongNetLM

    model, tokenizer = small_model(vocab_size=384), ByT5Tokenizer()
    harness = LongNetLM(model, tokenizer, batch_size=2)
    results = lm_eval.simple_evaluate(
        harness, tasks=["local_rolling", "local_generated"], task_manager=tasks, bootstrap_iters=0
    )["results"]
    assert results["local_generated"]["exact_match,none"] == 0.0

    # The same number, by hand: the first token is predicted from the end of another text.
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer("a number of things", add_special_tokens=False).input_ids])
    with torch.no_grad():
        scores = model(ids[None, :-1]).logits[0].log_softmax(-1)
    nats = -scores.gather(-1, ids[1:, None]).sum().item()
    expected = nats / math.log(2) / len("a number of things")
    assert results["local_rolling"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)


def test_prompts_that_would_be_cut_are_refused() -> None:
    from lm_eval.api.instance import Instance

    from longnet.evaluation.harness import LongNetLM

    harness = LongNetLM(small_model(vocab_size=384), ByT5Tokenizer(), batch_size=1)
    options = {"max_gen_toks": 10, "until": ["zzz"]}
    fitting, longer, longest = (
        Instance("generate_until", {}, ("x" * number, dict(options)), 0) for number in (54, 55, 60)
    )
    assert len(harness.generate_until([fitting], disable_tqdm=True)) == 1
    with pytest.raises(ValueError, match=r"60 tokens and an answer of 10 .* max_length=64: .* give max_length=70 or"):
        harness.generate_until([fitting, longest, longer], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"give max_length=65 or"):
        harness.generate_until([longer], disable_tqdm=True)
    fitting, longer = (Instance("loglikelihood", {}, ("x" * number, "yyyyy"), 0) for number in (60, 61))
    assert len(harness.loglikelihood([fitting], disable_tqdm=True)) == 1
    with pytest.raises(ValueError, match=r"61 tokens and an answer of 4 are longer .* give max_length=65 or"):
        harness.loglikelihood([longer], disable_tqdm=True)
    wider = LongNetLM(small_model(vocab_size=384), ByT5Tokenizer(), max_length=128, batch_size=1)
    assert len(wider.generate_until([longest], disable_tqdm=True)) == 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LongNet's directory with a tokenizer of words: one of RULER's tasks wants more than bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unknown>": 0, "<end>": 1, "what": 2, "number": 3}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")
    path = tmp_path_factory.mktemp("exported") / "model"
    export_checkpoint(small_model(max_position_embeddings=2048), path, tokenizer)
    return path


def test_a_directory_by_name_without_a_network(tasks: Any, exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("wonderwords")
    # nltk's data is for haystacks of essays, which need a network; it would be waited for all the same.
    (tmp_path / "tokenizers" / "punkt_tab").mkdir(parents=True)
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT), "NLTK_DATA": str(tmp_path)}
    command = [
        sys.executable, "scripts/harness.py", "--tasks", "local_rolling,local_generated,ruler_vt", "--limit", "1",
        "--include_path", tmp_path, "--metadata", '{"max_seq_lengths": [1024]}', "--output_path", tmp_path / "results",
        "--model_args", f"pretrained={exported}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "results").rglob("*.json")
    results = json.loads(written.read_text())["results"]
    assert results["local_rolling"]["bits_per_byte,none"] > 0
    assert results["local_generated"]["exact_match,none"] == 0.0
    assert results["ruler_vt"]["1024,none"] == 0.0


def test_directories_that_cannot_be_scored(exported: Path, tmp_path: Path) -> None:
    from longnet.evaluation.harness import LongNetLM

    with pytest.raises(ValueError, match="no such directory"):
        LongNetLM(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"model_args {'max_lenght': 8}: unknown, or not for --model longnet"):
        LongNetLM(str(exported), max_lenght=8)
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight is missing"):
        LongNetLM(str(broken))
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer: expected tokenizer=DIR"):
        LongNetLM(str(broken))
