"""Checkpoints in and out: the same function, the same bits, and a clear word on what does not fit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from longnet.model import LongNetForCausalLM
from longnet.model.hf import export_checkpoint, load_checkpoint, read_config
from longnet.model.rope_extension import extend_rope
from tests.model.models import DILATED, PAPER, small_model, some_tokens

from .originals import FAMILIES, original

PATTERN: dict[str, Any] = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}
DENSE: dict[str, Any] = {"segment_lengths": [4096], "dilation_rates": [1]}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def same_bits(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_imported_model_is_the_same_function(name: str, tmp_path: Path) -> None:
    theirs = original(name)
    theirs.save_pretrained(tmp_path)
    tokens = some_tokens(2, 48)
    expected = theirs(tokens).logits
    ours = LongNetForCausalLM.from_hf(tmp_path)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours(tokens).logits, expected, atol=2e-4, rtol=1e-4)
    if "window" not in name:
        one_level = LongNetForCausalLM.from_hf(theirs, **DENSE)
        torch.testing.assert_close(one_level(tokens).logits, expected, atol=2e-4, rtol=1e-4)
        assert not torch.allclose(LongNetForCausalLM.from_hf(theirs, **PATTERN)(tokens).logits, expected, atol=1e-2)
    if "dynamic" not in name and "longrope" not in name:
        generated = ours.generate(tokens[:, :9], max_new_tokens=30)
        assert torch.equal(generated, theirs.generate(tokens[:, :9], max_new_tokens=30))


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trips_keep_every_bit(name: str, tmp_path: Path) -> None:
    theirs = original(name).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = LongNetForCausalLM.from_hf(tmp_path / "theirs")
    assert ours.dtype == torch.bfloat16
    ours.save_pretrained(tmp_path / "ours")
    loaded = LongNetForCausalLM.from_pretrained(tmp_path / "ours")
    assert export_checkpoint(loaded, tmp_path / "back") == FAMILIES[name][0]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(theirs)
    assert same_bits(back, theirs)
    assert _fields(tmp_path / "back") == _fields(tmp_path / "theirs")
    assert same_bits(LongNetForCausalLM.from_hf(tmp_path / "back"), ours)


def test_a_pattern_stays_a_longnet_and_loads_by_import_alone(tmp_path: Path) -> None:
    ours = LongNetForCausalLM.from_hf(original("qwen3"), **PATTERN)
    assert export_checkpoint(ours, tmp_path / "out") == "longnet"
    code = (
        "import longnet\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        "print(type(model).__name__, model.config.attention[0]['segment_lengths'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "LongNetForCausalLM [8, 32]\n", done.stderr
    again = LongNetForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(some_tokens()).logits, ours(some_tokens()).logits)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"query_key_norm": True}], ids=str)
def test_a_model_of_our_own_exports_to_the_family_that_fits(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = small_model(attention=["dense"], **changes)
    export_checkpoint(ours, tmp_path / "out", dense=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(theirs(some_tokens()).logits, ours(some_tokens()).logits, atol=2e-4, rtol=1e-4)


BIASED = {"attention_bias": True, "attention_output_bias": False}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"query_key_norm": True, "mlp_bias": True}, "mlp_bias=True"),
        ({**BIASED, "mlp_bias": True}, "mlp_bias=True"),
        ({"query_key_norm": True, "no_rope_layers": [1, 0]}, "query_key_norm=True"),
        ({"query_key_norm": True, **BIASED}, "attention_output_bias=False"),
        ({"attention_output_bias": True}, "attention_output_bias=True"),
        ({"rope_parameters": PARTIAL}, "rope_parameters=.*'partial_rotary_factor': 0.5"),
        ({"rope_parameters": {**PARTIAL, "rope_type": "linear", "factor": 2.0}}, "partial_rotary_factor=0.5"),
    ],
    ids=str,
)
def test_what_no_family_computes_stays_a_longnet(changes: dict[str, Any], missing: str, tmp_path: Path) -> None:
    ours = small_model(attention=["dense"], **changes)
    assert export_checkpoint(ours, tmp_path / "out") == "longnet"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(some_tokens()).logits, ours(some_tokens()).logits)
    with pytest.raises(ValueError, match=missing):
        export_checkpoint(ours, tmp_path / "dense", dense=True)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_partial_rotation_that_a_family_ignores_is_ignored(name: str, tmp_path: Path) -> None:
    theirs = original(name, rope_parameters=PARTIAL)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = LongNetForCausalLM.from_hf(theirs)
    torch.testing.assert_close(ours(some_tokens()).logits, theirs(some_tokens()).logits, atol=2e-4, rtol=1e-4)
    changes = extend_rope(read_config(tmp_path / "theirs"), "keep", 64)
    again = LongNetForCausalLM.from_hf(tmp_path / "theirs", **changes)
    assert torch.equal(again.model.rotary_emb.inv_freq, ours.model.rotary_emb.inv_freq)
    assert "partial_rotary_factor" not in changes["rope_parameters"]
    assert export_checkpoint(ours, tmp_path / "back") == FAMILIES[name][0]
    theirs.config.rope_parameters = {**PARTIAL, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.5 with rope_type='linear'"):
        LongNetForCausalLM.from_hf(theirs)


def test_a_pattern_of_tuples_is_dense_too(tmp_path: Path) -> None:
    ours = small_model(attention=[{"name": "dilated", "segment_lengths": (64,), "dilation_rates": (1,)}])
    assert export_checkpoint(ours, tmp_path / "out", dense=True) == "llama"


def test_a_longer_context_by_other_fields() -> None:
    ours = LongNetForCausalLM.from_hf(
        original("llama"),
        **PATTERN,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        dtype=torch.float64,
    )
    assert ours.config.max_position_embeddings == 256
    assert ours.dtype == torch.float64
    torch.testing.assert_close(
        ours.model.rotary_emb.inv_freq * 4, original("llama").model.rotary_emb.inv_freq, rtol=1e-6, atol=0
    )


def test_the_imported_model_is_a_copy() -> None:
    theirs = original("llama")
    ours = LongNetForCausalLM.from_hf(theirs)
    ours.model.norm.weight.zero_()
    ours.generation_config.max_new_tokens = 7
    assert theirs.model.norm.weight.abs().sum() > 0
    assert theirs.generation_config.max_new_tokens != 7


def test_the_file_that_transformers_reads_is_read(tmp_path: Path) -> None:
    theirs = original("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    theirs.model.norm.weight.fill_(3.0)
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert same_bits(AutoModelForCausalLM.from_pretrained(tmp_path), theirs)
    assert LongNetForCausalLM.from_hf(tmp_path).model.norm.weight[0] == 3.0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"top_k": 20, "do_sample": False}, {"do_sample": False, "top_k": None}),
        ({"length_penalty": 2.0, "temperature": 1.0}, {"do_sample": None, "length_penalty": None}),
        ({"temperature": 1.0}, {"do_sample": None, "temperature": 1.0}),
    ],
    ids=str,
)
def test_how_to_generate_comes_along_and_can_be_saved(
    written: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    original("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({**written, "eos_token_id": [2, 7]}))
    export_checkpoint(LongNetForCausalLM.from_hf(tmp_path / "theirs"), tmp_path / "out", dense=False)
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.eos_token_id == [2, 7]


def test_options_of_a_pattern_need_one() -> None:
    for model in (original("llama"), small_model()):
        with pytest.raises(ValueError, match=r"heads='grouped', shift=5: .*expected segment_lengths"):
            LongNetForCausalLM.from_hf(model, heads="grouped", shift=5)


def test_dropout_comes_along() -> None:
    half = {**DILATED, "dropout": 0.5}
    for attention, expected in (([half], [0.5]), ([half, "dense"], [0.5, None]), ([DILATED, "dense"], [None])):
        ours = LongNetForCausalLM.from_hf(small_model(attention=attention), **PATTERN)
        assert [spec.get("dropout") for spec in ours.config.attention] == expected
        assert [spec["segment_lengths"] for spec in ours.config.attention] == [[8, 32]] * len(expected)
    theirs = original("mistral-window", attention_dropout=0.5)
    assert LongNetForCausalLM.from_hf(theirs, **PATTERN).config.attention[0]["dropout"] == 0.5
    with pytest.raises(ValueError, match=r"attention_dropout=0.5: sliding_window has none; expected 0"):
        LongNetForCausalLM.from_hf(theirs)
    # A window that no layer has.
    LongNetForCausalLM.from_hf(original("qwen2-window", max_window_layers=3, attention_dropout=0.5))
    kept = LongNetForCausalLM.from_hf(theirs, attention=[{"name": "sliding_window", "window": 9}])
    torch.testing.assert_close(kept(some_tokens()).logits, theirs(some_tokens()).logits, atol=2e-4, rtol=1e-4)


def test_unsupported_architectures_name_the_others(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt_neox", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    with pytest.raises(ValueError, match=r"(?s)'gpt_neox' cannot be imported: .*llama.*qwen3.*attn_implementation"):
        LongNetForCausalLM.from_hf(AutoModelForCausalLM.from_config(config))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ValueError, match=r"model_type='unheard_of' cannot be read by transformers"):
        LongNetForCausalLM.from_hf(tmp_path)


def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    original("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.9.extra"] = torch.zeros(2, 3)
    tensors["lm_head.weight"] = torch.zeros(60, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file)
    with pytest.raises(ValueError) as caught:
        LongNetForCausalLM.from_hf(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  model.layers.0.mlp.up_proj.weight is missing, (48, 32)",
        "  model.norm.weight is missing, (32,)",
        "  model.layers.9.extra is left over, (2, 3)",
        "  lm_head.weight has shape (60, 32), expected (61, 32)",
    ]


def test_a_head_that_should_be_the_embedding_is_compared(tmp_path: Path) -> None:
    original("smollm2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    LongNetForCausalLM.from_hf(tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        LongNetForCausalLM.from_hf(tmp_path)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


def test_pickles_are_refused_and_never_read(tmp_path: Path) -> None:
    original("llama").config.save_pretrained(tmp_path)
    bomb = pickle.dumps(Bomb())
    (tmp_path / "pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"holds \['pytorch_model.bin'\]: pickles run code"):
        LongNetForCausalLM.from_hf(tmp_path)
    with pytest.raises(ValueError, match=r"is a pickle, which runs code"):
        LongNetForCausalLM.from_hf(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"model.safetensors is no safetensors file, or is damaged"):
        LongNetForCausalLM.from_hf(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such directory; expected a local checkpoint"):
        LongNetForCausalLM.from_hf(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"has no config.json"):
        LongNetForCausalLM.from_hf(tmp_path)
    theirs = original("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"(?s){shards[0].name} is no .*cut short.*{shards[1].name} is missing"):
        LongNetForCausalLM.from_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        LongNetForCausalLM.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        LongNetForCausalLM.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json is damaged: expected an object, not a list"):
        LongNetForCausalLM.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**theirs.config.to_dict(), "hidden_size": "many"}))
    with pytest.raises(ValueError, match=r"'llama' cannot be read by transformers: .*'hidden_size' expected int"):
        LongNetForCausalLM.from_hf(tmp_path)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer of .* is damaged, or of an unknown kind"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    with pytest.raises(ValueError, match=r"is no GGUF file"):
        LongNetForCausalLM.from_hf(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ValueError, match=r"model.gguf' is damaged|pip install gguf"):
        LongNetForCausalLM.from_hf(tmp_path / "model.gguf")


def test_export_writes_all_or_nothing(tmp_path: Path) -> None:
    ours = LongNetForCausalLM.from_hf(original("llama"), **PATTERN)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(ValueError, match=r"is there and not empty"):
        export_checkpoint(ours, tmp_path / "used")
    with pytest.raises(ValueError, match=r"dense=True: .*segment length of at least 64, or dense=False"):
        export_checkpoint(ours, tmp_path / "out", dense=True)
    with pytest.raises(ValueError, match=r"no family of transformers has .*norm='layernorm', sub_layernorm=True"):
        export_checkpoint(small_model(**PAPER), tmp_path / "out", dense=True)
    with pytest.raises(ValueError, match=r"the tokenizer does not fit: its largest id is 70"):
        export_checkpoint(ours, tmp_path / "out", tokenizer=_tokenizer(71))
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    export_checkpoint(ours, tmp_path / "out", tokenizer=_tokenizer(61))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def _fields(path: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads((path / "config.json").read_text()).items() if k != "transformers_version"}


def test_a_gguf_file_is_dequantised_and_imported(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    theirs = original("smollm2")
    config = theirs.config
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    for name, tensor in theirs.state_dict().items():
        target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name)
        if name == "lm_head.weight":
            continue
        if target is None:
            number, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            target = f"blk.{number}.{names[part]}.weight"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                # llama.cpp rotates neighbours, transformers the two halves.
                tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(target, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = LongNetForCausalLM.from_hf(tmp_path / "model.gguf", **PATTERN)
    expected = LongNetForCausalLM.from_hf(theirs, **PATTERN)
    assert same_bits(ours, expected)
    cut = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(ValueError, match=r"cut.gguf' is damaged"):
        LongNetForCausalLM.from_hf(tmp_path / "cut.gguf")
