"""The operator in decoders that keep their own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from longnet.model import LongNetForCausalLM
from longnet.model.hf import set_pattern
from tests.model.models import some_tokens

from .originals import original

LEVELS: dict[str, Any] = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}
SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gpt_neox": {"num_hidden_layers": 2, "rotary_pct": 0.5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=DECODERS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHAPE, **DECODERS[request.param])
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path)
    return tmp_path


def load(directory: Path, lengths: list[int], rates: list[int], **options: Any) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory)
    set_pattern(config, lengths, rates, **options)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, attn_implementation="longnet")
    return model.eval()


def test_one_segment_is_the_original(directory: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    tokens = some_tokens(2, 48)
    ours = load(directory, [4096], [1])
    torch.testing.assert_close(ours(tokens).logits, expected(tokens).logits, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(load(directory, [8, 32], [1, 2])(tokens).logits, expected(tokens).logits, atol=1e-2)


def test_steps_padding_and_packing_are_the_whole(directory: Path) -> None:
    model = load(directory, [8, 32], [1, 4], shift=3)
    tokens = some_tokens(2, 40)
    whole = model(tokens).logits
    cache = model(tokens[:, :17], use_cache=True).past_key_values
    steps = [
        model(tokens[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((17, 18), (18, 30), (30, 40))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 17:], atol=1e-4, rtol=1e-4)

    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :11] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[0], whole[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded[1, 11:], model(tokens[1:, 11:]).logits[0], atol=1e-4, rtol=1e-4)
    generated = model.generate(tokens[:, :20], attention_mask=mask[:, :20], max_new_tokens=15)
    alone = model.generate(tokens[1:, 11:20], max_new_tokens=15, use_cache=False)
    assert torch.equal(generated[1:, 20:], alone[:, 9:])


def test_it_is_the_function_that_an_imported_model_has() -> None:
    llama = original("llama")
    ours = LongNetForCausalLM.from_hf(llama, **LEVELS)
    set_pattern(llama.config, **LEVELS)
    llama.set_attn_implementation("longnet")
    torch.testing.assert_close(llama(some_tokens()).logits, ours(some_tokens()).logits, atol=2e-4, rtol=1e-4)


def test_the_pattern_is_saved_with_the_model(directory: Path, tmp_path: Path) -> None:
    model = load(directory, lengths=[8, 32], rates=[1, 2])
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="longnet")
    assert torch.equal(again(some_tokens()).logits, model(some_tokens()).logits)


def test_gradients_flow(directory: Path) -> None:
    with torch.enable_grad():
        model = load(directory, [8, 32], [1, 2])
        model(some_tokens(), labels=some_tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_missing_pattern_and_other_scores_are_refused(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="longnet")
    with pytest.raises(ValueError, match=r"longnet=None; expected a pattern, for example"):
        model(some_tokens())
    config = AutoConfig.for_model("gemma2", **SHAPE, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)
    set_pattern(config, **LEVELS)
    with pytest.raises(ValueError, match=r"Gemma2Attention needs \['softcap'\]"):
        AutoModelForCausalLM.from_config(config, attn_implementation="longnet")(some_tokens())


@pytest.mark.parametrize("family", ["bloom", "codegen", "xglm"])
def test_code_that_computes_attention_itself_is_refused(family: str) -> None:
    """Without a mask it would see what is to come."""
    shape = {"n_embd": 32, "d_model": 32, "n_layer": 1, "num_layers": 1, "n_head": 4, "rotary_dim": 4, "ffn_dim": 48}
    config = AutoConfig.for_model(family, **SHAPE, **shape, attention_heads=4)
    set_pattern(config, **LEVELS)
    with pytest.raises(ValueError, match=f"the code of '{family}' computes attention itself; expected a decoder"):
        AutoModelForCausalLM.from_config(config, attn_implementation="longnet")(some_tokens())


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_attention_that_is_not_causal_is_refused(family: str) -> None:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = AutoConfig.for_model(family, **SHAPE, **layers, **heads)
    set_pattern(config, **LEVELS)
    with pytest.raises(ValueError, match="Attention looks both ways, or at another text; expected a decoder's"):
        AutoModel.from_config(config, attn_implementation="longnet")(some_tokens())
