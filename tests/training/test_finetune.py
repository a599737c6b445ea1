"""Jobs that begin from a checkpoint: what is trained, what is left, and what comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longnet.config.schema import FinetuneConfig, OptimConfig
from longnet.model import LongNetForCausalLM
from longnet.model.hf import export_checkpoint
from longnet.training.finetune import choose_trained
from longnet.training.growth import ContextGrowth
from longnet.training.module import LongNetModule
from longnet.training.pretrained import attention_flops, head_weight, hidden_states
from longnet.training.recorder import Recorder
from longnet.training.run import train
from tests.model.hf.originals import original
from tests.model.models import some_tokens

from .jobs import losses, tiny_job, write_corpus

DECODERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {"num_hidden_layers": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "llama"
    original("smollm2", vocab_size=384).save_pretrained(path)
    return path


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("kind", ["all", "attention", "no_embeddings", "lora"])
def test_trains_what_it_is_told_and_exports(kind: str, llama: Path, corpus: Path, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, corpus, run__name=kind, model__pretrained=str(llama), finetune__train=kind,
                   model__rope_extension="linear", data__context_length=128)  # fmt: skip
    train(job)
    run = tmp_path / kind
    before, after = (load_file(path / "model.safetensors") for path in (llama, run / "model"))
    names = changed(before, after)
    embedding = "model.embed_tokens.weight"
    expected = {
        "all": set(before),
        "attention": {name for name in before if ".self_attn." in name},
        "no_embeddings": set(before) - {embedding},
        "lora": {name for name in before if name.endswith("_proj.weight")},
    }[kind]
    assert names == expected
    model = LongNetForCausalLM.from_pretrained(run / "model")
    assert model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["factor"] == 2.0
    rows = losses(run / "metrics.csv")
    assert rows[-1]["val/loss"] < rows[2]["val/loss"]
    assert (run / "adapter").exists() == (kind == "lora")
    assert export_checkpoint(model, tmp_path / f"{kind}-out") == "longnet"


def test_adapters_alone_give_the_merged_model(llama: Path, corpus: Path, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, corpus, run__name="lora", model__pretrained=str(llama), finetune__train="lora",
                   attention__layers=["dense"], finetune__lora_rank=4, data__context_length=64)  # fmt: skip
    train(job)
    run = tmp_path / "lora"
    assert set(load_file(run / "adapter" / "adapter_model.safetensors"))
    base = LongNetForCausalLM.from_hf(llama)
    tuned = PeftModel.from_pretrained(base, run / "adapter").eval()
    assert export_checkpoint(LongNetForCausalLM.from_pretrained(run / "model"), tmp_path / "out") == "llama"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(tuned(some_tokens()).logits, merged(some_tokens()).logits, atol=2e-4, rtol=1e-4)
    # Started again, the run has nothing left to do, and still gives the same weights.
    weights = load_file(run / "model" / "model.safetensors")
    train(job)
    assert not changed(weights, load_file(run / "model" / "model.safetensors"))


def test_the_first_loss_is_the_checkpoints_own(llama: Path, corpus: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model__pretrained": str(llama), "data__context_length": 64, "attention__layers": ["dense"],
        "trainer__max_steps": 1, "trainer__val_every": 1, "optim__lr": 1e-12, "optim__warmup_steps": 0,
    }  # fmt: skip
    rows = []
    for name, keep_code in (("imported", False), ("own", True)):
        train(tiny_job(tmp_path, corpus, run__name=name, model__keep_code=keep_code, **options))
        rows.append(losses(tmp_path / name / "metrics.csv")[-1])
    assert rows[0]["val/loss"] == pytest.approx(rows[1]["val/loss"], abs=1e-5)
    assert rows[0]["train/loss"] == pytest.approx(rows[1]["train/loss"], abs=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_its_own_code_trains(family: str, corpus: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=384, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, **DECODERS[family],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    job = tiny_job(
        tmp_path, corpus, run__name="run", model__pretrained=str(tmp_path / "theirs"), model__keep_code=True,
        trainer__activation_checkpointing__kind="full",
    )  # fmt: skip
    train(job)
    rows = losses(tmp_path / "run" / "metrics.csv")
    assert rows[-1]["val/loss"] < rows[2]["val/loss"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", attn_implementation="longnet")
    assert type(trained).__name__.lower().startswith(family.replace("_text", "").replace("_", ""))
    assert trained.config.longnet["segment_lengths"] == [16, 32, 64]
    with torch.no_grad():
        logits = hidden_states(trained, some_tokens()) @ head_weight(trained).T
        torch.testing.assert_close(logits, trained(some_tokens()).logits, atol=1e-4, rtol=1e-4)


def test_the_context_grows_at_shares_of_the_steps() -> None:
    growth = ContextGrowth([(16, 0.25), (32, 0.75)], 8)
    assert [growth.context(step) for step in range(8)] == [16, 16, 32, 32, 32, 32, None, None]
    # 0.7 * 10 is a little more than 7.
    assert ContextGrowth([(16, 0.7)], 10).stages == [(16, 7)]


def test_the_context_grows_by_cutting_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LongNetForCausalLM.from_hf(original("llama"), [8, 64], [1, 2])
    module = LongNetModule(model, OptimConfig(), 8, 2, 0)
    # No trainer, and so no other process that shares the sequence.
    monkeypatch.setattr(LongNetModule, "_sequence", None)
    batch = {"input_ids": some_tokens(2, 64), "labels": some_tokens(2, 64)}
    with torch.no_grad():
        cut = module._loss_sums(batch, 16)
        alone = [
            module._loss_sums({name: rows[row : row + 1, start : start + 16] for name, rows in batch.items()}).nll
            for row in range(2)
            for start in range(0, 64, 16)
        ]
        whole = module._loss_sums(batch)
    torch.testing.assert_close(cut.nll, torch.stack(alone).sum())
    assert cut.tokens == whole.tokens
    assert not torch.allclose(cut.nll, whole.nll)


def test_a_run_takes_its_growth_from_the_config(llama: Path, corpus: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"model__pretrained": str(llama), "trainer__max_steps": 2, "trainer__val_every": 2,
                              "optim__warmup_steps": 0}  # fmt: skip
    train(tiny_job(tmp_path, corpus, run__name="grown", finetune__context_growth=[[16, 0.5]], **common))
    train(tiny_job(tmp_path, corpus, run__name="whole", **common))
    grown, whole = (losses(tmp_path / name / "metrics.csv")[0] for name in ("grown", "whole"))
    assert grown["train/loss"] != whole["train/loss"]


def test_flops_are_those_of_the_contexts_that_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longnet.training.recorder.peak_memory_gib", lambda device: 0.0)
    clock = SimpleNamespace(lap=lambda device: 2.0)
    data = SimpleNamespace(context_of=lambda step: 16 if step < 2 else None, part_rows=lambda step: {}, take_wait=float)
    recorder: Any = Recorder(3, {16: 10.0, None: 100.0}, torch.float32, clock, data)  # type: ignore[arg-type]
    recorder._matmul_rate = 1000.0
    module = SimpleNamespace(
        positions_computed=0, window_tokens=0, gradient_norm=0.0, device=torch.device("cpu"), settle=lambda: None
    )
    trainer = SimpleNamespace(world_size=2, global_step=3, optimizers=[SimpleNamespace(param_groups=[{"lr": 1.0}])])
    for step in range(3):
        module.positions_computed += 50
        recorder._count(module, step)
    row = recorder._training_row(trainer, module)
    assert (row["tokens_per_second"], row["mfu"]) == (150, 3.0)


def test_attention_flops_count_what_is_seen() -> None:
    ours = LongNetForCausalLM.from_hf(original("mistral-window"))
    theirs = original("mistral-window")
    theirs.config.longnet = {"segment_lengths": [64], "dilation_rates": [1]}
    theirs.config.layer_types = ["sliding_attention"] * 3
    assert attention_flops(theirs, 64) == attention_flops(ours, 64)


def test_says_what_does_not_fit(llama: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"finetune.lora_targets has \['query'\]: .*expected some of \['down_proj'"):
        choose_trained(original("llama"), FinetuneConfig(train="lora", lora_targets=["query", "q_proj"]))
    small = tmp_path / "small"
    original("llama").save_pretrained(small)
    with pytest.raises(ValueError, match=r"data.tokenizer=bytes does not fit model.pretrained=.*384 ids, the model 61"):
        train(tiny_job(tmp_path, corpus, run__name="y", model__pretrained=str(small)))
    capped = AutoConfig.for_model(
        "gemma3_text", vocab_size=384, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_hidden_layers=1, final_logit_softcapping=0.1, initializer_range=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(capped).save_pretrained(tmp_path / "capped")
    with pytest.raises(ValueError, match=r"the logits of Gemma3ForCausalLM are more than a linear map"):
        train(tiny_job(tmp_path, corpus, run__name="x", model__pretrained=str(tmp_path / "capped"),
                       model__keep_code=True))  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"small", "capped"}


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["lm_head"]])
def test_the_head_gets_no_adapter_since_the_loss_would_pass_it_by(targets: list[str]) -> None:
    expected = r"finetune.lora_targets has \['lm_head'\]: .* before its head; expected some of \['down_proj'"
    for model in (original("llama"), LongNetForCausalLM.from_hf(original("llama-biased"))):
        with pytest.raises(ValueError, match=expected):
            choose_trained(model, FinetuneConfig(train="lora", lora_targets=targets))


@pytest.mark.parametrize("keep_code", [False, True])
def test_a_checkpoint_that_is_not_whole_leaves_nothing(
    keep_code: bool, llama: Path, corpus: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    file = broken / "model.safetensors"
    whole = load_file(file)

    def refused() -> str:
        with pytest.raises(ValueError) as caught:
            train(tiny_job(tmp_path, corpus, run__name="x", model__pretrained=str(broken), model__keep_code=keep_code))
        return str(caught.value)

    tensors = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    save_file({**tensors, "extra": torch.zeros(3), "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, file)
    lines = refused().splitlines()
    assert "does not fit its config" in lines[0]
    assert [line.split(",")[0].strip() for line in lines[1:3]] == ["model.norm.weight is missing", "extra is left over"]
    assert lines[3] == "  model.layers.0.mlp.up_proj.weight has shape (2, 2), expected (48, 24)"
    save_file(whole, file)
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is no safetensors file, or is damaged or cut short" in refused()
    file.unlink()
    torch.save(whole, broken / "pytorch_model.bin")
    assert "holds ['pytorch_model.bin']: pickles run code" in refused()
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
