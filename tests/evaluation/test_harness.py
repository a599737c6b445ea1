"""lm-eval drives the model object, on a task that lies here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from tests.model.models import small_model

lm_eval = pytest.importorskip("lm_eval")

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
    short, long = (Instance("generate_until", {}, ("x" * number, dict(options)), 0) for number in (40, 60))
    assert len(harness.generate_until([short], disable_tqdm=True)) == 1
    with pytest.raises(ValueError, match=r"a prompt has 6\d tokens, and 54 fit: .*max_length=6"):
        harness.generate_until([long], disable_tqdm=True)
    scored = Instance("loglikelihood", {}, ("x" * 60, "yyyyyy"), 0)
    with pytest.raises(ValueError, match=r"a prompt has 6\d tokens, and 65 fit"):
        harness.loglikelihood([scored], disable_tqdm=True)
    wider = LongNetLM(small_model(vocab_size=384), ByT5Tokenizer(), max_length=128, batch_size=1)
    assert len(wider.generate_until([long], disable_tqdm=True)) == 1
