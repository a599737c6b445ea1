"""Generation with a bounded cache: every step is the full forward pass, every sequence as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, TextStreamer

from longnet.model import LongNetCache, LongNetForCausalLM, read, read_stream
from longnet.model.generation import stream

from .models import DILATED, HYBRID, PAPER, SHIFTED, WINDOW, small_model, some_tokens

GROUPED = {**DILATED, "heads": "grouped"}
FORMS = {
    "dilated": {},
    "shifted": {"attention": [DILATED, SHIFTED]},
    "grouped": {"attention": [GROUPED]},
    "own-kv-heads": {"num_key_value_heads": 4},
    "paper": PAPER,
    "hybrid": {"attention": HYBRID, "num_hidden_layers": 5},
    "normed": {"query_key_norm": True, "no_rope_layers": [1, 0]},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def model(request: pytest.FixtureRequest) -> LongNetForCausalLM:
    return small_model(**request.param).double()


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def read_all(model: LongNetForCausalLM, tokens: Tensor, sizes: list[int]) -> Tensor:
    cache = LongNetCache(model.config)
    parts = tokens.split(sizes, 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize("sizes", [[1] * 60, [9, *[1] * 51], [8, 24, 28], [3, 1, 30, 25, 1]], ids=str)
def test_reading_in_pieces_is_the_full_forward_pass(model: LongNetForCausalLM, sizes: list[int]) -> None:
    tokens = some_tokens(2, 60)
    torch.testing.assert_close(read_all(model, tokens, sizes), model(tokens).logits, atol=1e-10, rtol=0)


def test_reads_long_inputs_in_pieces_and_keeps_what_is_wanted(model: LongNetForCausalLM) -> None:
    tokens = some_tokens(2, 60)
    expected = model.model(tokens)
    for keep in (0, 1, 25):
        cache = LongNetCache(model.config)
        read(model.model, tokens[:, :5], cache)
        hidden = read(model.model, tokens[:, 5:], cache, keep, piece=16)
        torch.testing.assert_close(hidden, expected[:, -(keep or 55) :], atol=1e-10, rtol=0)
    cache = LongNetCache(model.config)
    parts = [hidden for _, hidden in read_stream(model.model, tokens.split(16, 1), cache)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=0)


def test_generates_what_it_would_without_a_cache(model: LongNetForCausalLM) -> None:
    prompt = some_tokens(2, 9)
    expected = model.generate(prompt, max_new_tokens=26, use_cache=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=26), expected)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_beams_and_samples_are_those_without_a_cache(options: dict[str, Any]) -> None:
    model = small_model(attention=HYBRID, num_hidden_layers=5).double()
    results = []
    for cached in (True, False):
        torch.manual_seed(0)
        results.append(model.generate(some_tokens(2, 9), max_new_tokens=26, use_cache=cached, **options))
    assert torch.equal(*results)


def test_a_padded_batch_generates_what_each_would_alone(model: LongNetForCausalLM) -> None:
    lengths = [9, 3, 1]
    prompts = some_tokens(3, 9)
    mask = torch.stack([torch.arange(9) >= 9 - length for length in lengths]).long()
    result = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=30,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, length in enumerate(lengths):
        alone = result.sequences[row : row + 1, 9 - length :]
        full = model(alone).logits[0, length - 1 : -1]
        assert torch.equal(alone[0, length:], full.argmax(-1))
        torch.testing.assert_close(torch.stack(result.logits)[:, row], full.float(), atol=1e-5, rtol=0)


def test_a_padded_batch_is_read_in_pieces(model: LongNetForCausalLM) -> None:
    lengths = [40, 23, 5]
    tokens = some_tokens(3, 40)
    mask = torch.stack([torch.arange(40) >= 40 - length for length in lengths]).long()
    cache = LongNetCache(model.config)
    first = read(model.model, tokens[:, :30], cache, attention_mask=mask[:, :30], piece=7)
    hidden = torch.cat((first, read(model.model, tokens[:, 30:], cache, attention_mask=mask, piece=4)), 1)
    for row, length in enumerate(lengths):
        alone = model.model(tokens[row : row + 1, 40 - length :])
        torch.testing.assert_close(hidden[row : row + 1, 40 - length :], alone, atol=1e-10, rtol=0)


def test_goes_on_from_a_cache() -> None:
    model = small_model().double()
    prompt = some_tokens(1, 20)
    first = model.generate(prompt, max_new_tokens=10, return_dict_in_generate=True)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=10)
    assert torch.equal(again, model.generate(prompt, max_new_tokens=20))


def test_goes_on_from_what_was_streamed() -> None:
    model = small_model().double()
    prompt, cache = some_tokens(1, 20), LongNetCache(model.config)
    said = torch.tensor([[*stream(model, prompt, cache, 10)]])
    again = model.generate(torch.cat([prompt, said], 1), past_key_values=cache, max_new_tokens=10)
    assert torch.equal(again, model.generate(prompt, max_new_tokens=20))


def test_streams() -> None:
    class Collector(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    streamer = Collector()
    result = small_model().generate(some_tokens(1, 5), max_new_tokens=7, streamer=streamer)
    assert streamer.seen == [*result[0].tolist(), -1]


@pytest.mark.parametrize("attention", [[DILATED], [SHIFTED, GROUPED, WINDOW]], ids=["dilated", "mixed"])
def test_memory_and_work_do_not_grow_with_the_length(attention: list[Any]) -> None:
    model = small_model(attention=attention, num_hidden_layers=3)
    cache = LongNetCache(model.config)
    measured = []
    for length in (64, 640, 1024):
        model(some_tokens(1, length - cache.columns), past_key_values=cache, logits_to_keep=1)
        with FlopCounterMode(display=False) as counter, torch.profiler.profile() as profile:
            model(some_tokens(1, 1), past_key_values=cache)
        operations = sum(event.count for event in profile.key_averages())
        measured.append((cache.num_bytes, counter.get_total_flops(), operations))
    assert measured[0] == measured[1] == measured[2]
    config = model.config
    rows = sum(state.store.shape[3] for state in cache.states if state.store is not None)
    assert cache.num_bytes == rows * 2 * config.num_key_value_heads * config.head_dim * 4


def test_forgets_and_repeats() -> None:
    model = small_model().double()
    tokens = some_tokens(2, 30)
    cache = LongNetCache(model.config)
    model(tokens, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == cache.num_bytes == 0
    model(tokens[:1, :20], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    logits = model(tokens[:1, 20:].repeat(2, 1), past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens[:1]).logits[:, 20:].repeat(2, 1, 1), atol=1e-10, rtol=0)


def test_says_what_does_not_fit() -> None:
    model = small_model()
    tokens = some_tokens()
    right = torch.ones_like(tokens)
    right[0, 30:] = 0
    with pytest.raises(ValueError, match=r"zeros behind a sequence's first token: .*padding_side='left'"):
        model(tokens, attention_mask=right, use_cache=True)
    with pytest.raises(ValueError, match=r"past_key_values is a DynamicCache: expected a LongNetCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"cache_implementation='static': expected None"):
        model.generate(tokens, cache_implementation="static", max_new_tokens=1)
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"input_ids has 1 rows: past_key_values holds 2"):
        model(tokens[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"cu_seqlens is given with past_key_values"):
        model(tokens, past_key_values=cache, cu_seqlens=torch.tensor([0, 40]))
    for known in (tokens, tokens[:, :7]):
        with pytest.raises(ValueError, match=r"input_ids has \d+ tokens, and past_key_values holds 40: .* one more"):
            model.generate(known, past_key_values=cache, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"cannot be cut back"):
        cache.crop(3)
    with pytest.raises(ValueError, match=r"input_ids has 80 positions: xPos"):
        small_model(position_embedding="xpos")(tokens, past_key_values=_read(small_model(position_embedding="xpos")))


def _read(model: LongNetForCausalLM) -> LongNetCache:
    cache: LongNetCache = model(some_tokens(), use_cache=True).past_key_values
    return cache
