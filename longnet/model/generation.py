"""Token by token, at a cost that does not depend on how much was read before."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .cache import LongNetCache
from .decoder import LongNetForCausalLM
from .reading import read


# Not inference_mode: what it leaves in the cache could not be read on from outside.
@torch.no_grad()
def stream(
    model: LongNetForCausalLM,
    input_ids: Tensor,
    cache: LongNetCache,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[int]:
    """Reads a prompt of any length and yields what follows it, one token at a time.

    transformers' ``generate`` does the same and more, but carries the whole prompt from step to step.

    Args:
        model: the language model.
        input_ids: (1, N), read behind what the cache holds.
        cache: an empty one, or what was read before.
        max_new_tokens: how many to yield at most.
        temperature: of the softmax that tokens are drawn from; 0 takes the likeliest.
        top_k: only so many of the likeliest tokens are drawn from; 0 is all.
        top_p: only the likeliest tokens that together have this probability.
        stop: ends behind one of these tokens.
        seed: makes the draws the same every time.
    """
    if input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: expected one row with a token or more")
    context = model.config.max_position_embeddings
    length = cache.columns + input_ids.shape[1] + max_new_tokens
    if model.config.position_embedding == "xpos" and length > context:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} behind {cache.columns + input_ids.shape[1]} tokens: xPos is scaled for "
            f"max_position_embeddings={context}; expected at most {context - length + max_new_tokens}"
        )
    warpers = LogitsProcessorList()
    if temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    hidden = read(model.model, input_ids, cache, keep=1)
    for number in range(max_new_tokens):
        scores = model.lm_head(hidden[:, -1]).float()
        if temperature:
            warped = warpers(cast(LongTensor, input_ids), cast(FloatTensor, scores))
            token = torch.multinomial(warped.softmax(-1), 1, generator=generator)
        else:
            token = scores.argmax(-1, keepdim=True)
        found = int(token)
        yield found
        if found in stop or number + 1 == max_new_tokens:
            return
        hidden = model.model(token, past_key_values=cache)
