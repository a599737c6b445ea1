"""lm-eval on a model object, without its silent cut of prompts that are too long."""

from __future__ import annotations

from typing import Any

from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LongNetLM(HFLM):
    """The harness's own driver for transformers' models, which refuses what it would otherwise cut off on the left.

    A needle that was cut away with the haystack counts as a wrong answer of the model's.

    Args:
        model: a LongNet, or any decoder of transformers.
        tokenizer: its tokenizer.
        max_length: the longest prompt and answer together; the model's context by default. A LongNet reads beyond the
            context it was made for: say so by a larger number here.
        options: of the harness's ``HFLM``, such as ``batch_size``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        length = max_length or model.config.get_text_config().max_position_embeddings
        if tokenizer("x").input_ids[-1] == tokenizer.eos_token_id:
            # A tokenizer that ends every text would end the prompts too; without special tokens it does not.
            options.setdefault("add_bos_token", False)
        super().__init__(pretrained=model, tokenizer=tokenizer, max_length=length, **options)

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        ids, mask = super().tok_batch_encode(strings, *args, **options)
        _check(int(mask.sum(1).max()), left_truncate_len)
        return ids, mask

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        # One more than fits may be scored: the last token is only predicted.
        _check(max((len(context) + len(rest) for _, context, rest in requests), default=0), self.max_length + 1)
        return super()._loglikelihood_tokens(requests, *args, **options)


def _check(longest: int, limit: int | None) -> None:
    if limit is not None and longest > limit:
        raise ValueError(
            f"a prompt has {longest} tokens, and {limit} fit: the harness would cut it on the left without a word; "
            f"give max_length={longest} or more, with room for the answer, or shorter prompts"
        )
