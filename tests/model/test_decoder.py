from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
)

from longnet.attention import BLOCKS
from longnet.model import LongNetConfig, LongNetForCausalLM, LongNetModel

from .models import BLOCK_SPARSE, DILATED, HYBRID, PAPER, SHIFTED, WINDOW, small_model, some_tokens

FORMS = {"llama": {}, "paper": PAPER, "hybrid": {"attention": HYBRID, "num_hidden_layers": 5}}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_llama_with_the_same_weights_gives_the_same_logits() -> None:
    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_bias": True, "mlp_bias": True,
        "rope_theta": 5e5, "tie_word_embeddings": False, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**shape, rms_norm_eps=1e-5)).eval()
    for parameter in llama.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    ours = LongNetForCausalLM(LongNetConfig(**shape, attention=["dense"])).eval()
    ours.load_state_dict(llama.state_dict())
    tokens = some_tokens()
    expected = llama(tokens, labels=tokens)
    result = ours(tokens, labels=tokens)
    torch.testing.assert_close(result.logits, expected.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(result.loss, expected.loss)
    result.loss.backward()
    expected.loss.backward()
    for (name, mine), theirs in zip(ours.named_parameters(), llama.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_saves_and_loads_by_the_auto_classes(form: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(**form)
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict()) - {"lm_head.weight"}
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LongNetConfig)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LongNetForCausalLM)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens = some_tokens()
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_an_own_head_is_saved_too(tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    again = LongNetForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    tokens = some_tokens()
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_loading_in_bfloat16_keeps_exact_frequencies(tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    again = LongNetForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("block", [DILATED, SHIFTED, WINDOW, BLOCK_SPARSE, {"name": "dense"}], ids=lambda b: b["name"])
def test_a_changed_token_changes_no_earlier_logits(block: dict[str, Any]) -> None:
    model = small_model(attention=[block])
    tokens = some_tokens(1)
    before = model(tokens).logits
    for position in (7, 20, 39):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 61
        after = model(changed).logits
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def test_a_packed_document_gives_what_it_gives_alone(form: dict[str, Any]) -> None:
    model = small_model(**form)
    documents = [some_tokens(1, length) for length in (13, 1, 30)]
    borders = torch.tensor([0, 13, 14, 44], dtype=torch.int32)
    packed = model(torch.cat(documents, 1), cu_seqlens=borders).logits
    alone = torch.cat([model(document).logits for document in documents], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed, model(torch.cat(documents, 1)).logits, atol=1e-3)


@pytest.mark.parametrize("borders", [False, True])
def test_takes_what_padding_free_collators_give(borders: bool) -> None:
    model = small_model()
    documents = [some_tokens(1, length) for length in (13, 1, 30)]
    rows = [{"input_ids": document[0].tolist()} for document in documents]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=borders, return_tensors="pt")(rows)
    result = model(**batch)
    alone = torch.cat([model(document).logits for document in documents], 1)
    torch.testing.assert_close(result.logits, alone, atol=1e-5, rtol=1e-5)
    assert result.loss.isfinite()


def test_positions_restart_in_a_packed_row() -> None:
    """RoPE does not see it unless its frequencies depend on the length, as here beyond a context of 32."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = small_model(rope_parameters=rope, max_position_embeddings=32, attention=["dense"])
    first, second = some_tokens(1, 25), some_tokens(1, 30)
    packed = model(torch.cat([first, second], 1), cu_seqlens=torch.tensor([0, 25, 55])).logits
    torch.testing.assert_close(packed[:, 25:], model(second).logits, atol=1e-5, rtol=1e-5)


def test_position_ids_say_where_tokens_are() -> None:
    model = small_model(attention=["dense"])
    tokens = some_tokens()
    counted = model(tokens).logits
    torch.testing.assert_close(model(tokens, position_ids=torch.arange(40).expand(2, -1)).logits, counted)
    # RoPE knows only distances: the same ones give the same logits, others do not.
    moved = model(tokens, position_ids=torch.arange(40)[None] + 9).logits
    torch.testing.assert_close(moved, counted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(tokens, position_ids=torch.arange(40)[None] * 2).logits, counted, atol=1e-2)


def test_layers_take_the_blocks_in_turn() -> None:
    model = small_model(attention=HYBRID, num_hidden_layers=7)
    names = [spec if isinstance(spec, str) else spec["name"] for spec in HYBRID]
    expected = [BLOCKS[name] for name in [*names, *names[:2]]]
    assert [type(layer.self_attn.block) for layer in model.model.layers] == expected


def test_loss_is_that_of_the_next_token_and_leaves_out_what_is_masked() -> None:
    model = small_model()
    tokens = some_tokens()
    labels = tokens.clone()
    labels[0, :10] = -100
    result = model(tokens, labels=labels)
    expected = F.cross_entropy(result.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=7).loss * 7, expected * 69)


def test_logits_only_where_wanted() -> None:
    model = small_model()
    tokens = some_tokens()
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=3).logits, whole[:, -3:])
    places = torch.tensor([0, 17])
    torch.testing.assert_close(model(tokens, logits_to_keep=places).logits, whole[:, places])
    assert torch.equal(model(tokens, return_dict=False)[0], whole)


@pytest.mark.parametrize("reloaded", [False, True])
def test_generates_what_taking_the_likeliest_token_gives(form: dict[str, Any], reloaded: bool, tmp_path: Path) -> None:
    model = small_model(**form)
    if reloaded:
        model.save_pretrained(tmp_path)
        model = LongNetForCausalLM.from_pretrained(tmp_path)
    prompt = some_tokens(2, 9)
    expected = prompt
    for _ in range(12):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_what_it_gives_alone(form: dict[str, Any], side: str) -> None:
    model = small_model(**form)
    rows = [some_tokens(1, length) for length in (13, 40, 1)]
    padded = torch.full((3, 40), 7)
    mask = torch.zeros(3, 40, dtype=torch.long)
    places = [slice(40 - row.shape[1], 40) if side == "left" else slice(0, row.shape[1]) for row in rows]
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        padded[number, place] = row[0]
        mask[number, place] = 1
    logits = model(padded, attention_mask=mask).logits
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        torch.testing.assert_close(logits[number, place], model(row).logits[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(model(rows[1], attention_mask=mask[1:2] | 1).logits, model(rows[1]).logits)


def test_says_what_it_cannot_do() -> None:
    model = small_model()
    tokens = some_tokens()
    gap = torch.ones_like(tokens)
    gap[1, 5] = 0
    with pytest.raises(ValueError, match=r"attention_mask has a row with a gap"):
        model(tokens, attention_mask=gap)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 40, 40\): expected \(batch, positions\)"):
        model(tokens, attention_mask=torch.ones(2, 1, 40, 40))
    for name in ("output_hidden_states", "output_attentions"):
        assert model(tokens, **{name: False}).hidden_states is None
        with pytest.raises(ValueError, match=f"{name} is given: expected none"):
            model(tokens, **{name: True})
    with pytest.raises(ValueError, match=r"input_ids has 65 positions: .*max_position_embeddings=64"):
        small_model(position_embedding="xpos")(some_tokens(1, 65))


def test_every_parameter_learns(form: dict[str, Any]) -> None:
    model = small_model(**form)
    tokens = some_tokens()
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        # A bias that all keys share moves every score alike, so the softmax does not see it.
        if not name.endswith("k_proj.bias"):
            assert parameter.grad is not None, name
            assert parameter.grad.norm() > 0, name


def test_drops_in_training_only() -> None:
    model = small_model(dropout=0.5)
    tokens = some_tokens()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision_is_near_single(form: dict[str, Any], dtype: torch.dtype, autocast: bool) -> None:
    model = small_model(**form)
    tokens = some_tokens()
    exact = model(tokens).logits
    if autocast:
        with torch.autocast("cpu", dtype):
            rounded = model(tokens).logits
    else:
        rounded = model.to(dtype)(tokens).logits
    assert rounded.dtype == dtype
    assert ((rounded.float() - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("form", [FORMS["llama"], FORMS["paper"]], ids=["llama", "paper"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_compiles_whole(form: dict[str, Any], packed: bool) -> None:
    model = small_model(**form)
    tokens = some_tokens(1)
    borders = torch.tensor([0, 15, 40]) if packed else None
    expected = model.model(tokens, cu_seqlens=borders)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    compiled = model.model(tokens, cu_seqlens=borders)
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)
    compiled.sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.parameters())


def test_magneto_raises_the_gain_of_all_but_queries_and_keys() -> None:
    model = small_model(
        initialization="magneto", hidden_size=256, intermediate_size=512, num_hidden_layers=6, head_dim=32,
        num_attention_heads=8, num_key_value_heads=4, attention_bias=True,
    )  # fmt: skip
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                gain = 1.0 if name.endswith(("q_proj", "k_proj")) else math.sqrt(math.log(12))
                expected = gain * math.sqrt(2 / (module.in_features + module.out_features))
                assert module.weight.std().item() == pytest.approx(expected, rel=0.03), name
                assert module.bias is None or (module.bias == 0).all()
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.2, rel=0.05)


def test_normal_initialization_is_the_same_everywhere() -> None:
    model = small_model(hidden_size=256, intermediate_size=512, initializer_range=0.05)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
        else:
            assert (parameter == 1).all(), name


def test_the_decoder_stands_alone() -> None:
    model = small_model()
    hidden = model.model(some_tokens())
    assert isinstance(model.model, LongNetModel)
    assert hidden.shape == (2, 40, 32)
    torch.testing.assert_close(model.lm_head(hidden), model(some_tokens()).logits)
