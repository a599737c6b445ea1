"""lm-eval on a LongNet, without its silent cut of prompts that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import get_dtype
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longnet.model.hf.convert import check_tokenizer, find_tokenizer, import_checkpoint
from longnet.model.hf.weights import load_config

# What HFLM hands to every loader, whether it was asked for or not.
GIVEN = ("revision", "gpus", "offload_folder")


@register_model("longnet")
class LongNetLM(HFLM):
    """The harness's own driver for transformers' models, which refuses what it would otherwise cut off on the left.

    A needle that was cut away with the haystack counts as a wrong answer of the model's.

    Args:
        pretrained: a LongNet or any decoder of transformers, or the directory of one that ``import_checkpoint`` takes.
        tokenizer: its tokenizer, or the directory of one; the model's own directory by default.
        max_length: the longest prompt and answer together; the model's context by default. A LongNet reads beyond the
            context it was made for: say so by a larger number here.
        options: of the harness's ``HFLM``, such as ``batch_size``; for a directory also ``device`` and ``dtype``.

    Raises:
        ValueError: for a directory that cannot be read, has no tokenizer, or whose files do not fit its config.
    """

    def __init__(
        self,
        pretrained: PreTrainedModel | str,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        config = load_config(Path(pretrained)) if isinstance(pretrained, str) else pretrained.config
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            where = tokenizer or pretrained
            tokenizer = find_tokenizer(Path(where)) if isinstance(where, str) else None
            if tokenizer is None:
                raise ValueError(f"pretrained={where!r} has no tokenizer: expected tokenizer=DIR beside it")
        if tokenizer("x").input_ids[-1] == tokenizer.eos_token_id:
            # A tokenizer that ends every text would end the prompts too; without special tokens it does not.
            options.setdefault("add_bos_token", False)
        options.setdefault("backend", "causal")
        length = max_length or config.get_text_config().max_position_embeddings
        super().__init__(pretrained=pretrained, tokenizer=tokenizer, max_length=length, **options)

    def _create_model(self, pretrained: str, dtype: Any = "auto", **options: Any) -> None:
        # transformers would only warn of tensors that are missing, and score a model that is random in part.
        refused = {name: value for name, value in options.items() if value and name not in GIVEN}
        if refused:
            raise ValueError(
                f"model_args {refused}: unknown, or not for --model longnet; --model hf takes the harness's own "
                "options, and cuts long prompts"
            )
        self._model = import_checkpoint(pretrained, dtype=None if dtype in (None, "auto") else get_dtype(dtype))
        check_tokenizer(self.tokenizer, self._model.config)

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        ids, mask = super().tok_batch_encode(strings, *args, **options)
        if left_truncate_len is not None:
            _check(int(mask.sum(1).max()), self.max_length - left_truncate_len, self.max_length)
        return ids, mask

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        # One more than fits may be scored: the last token is only predicted.
        longest = max((len(context) + len(rest) for _, context, rest in requests), default=0)
        _check(longest, -1, self.max_length)
        return super()._loglikelihood_tokens(requests, *args, **options)


def _check(prompt: int, answer: int, limit: int) -> None:
    if prompt + answer > limit:
        room = f"{answer} of room for the answer" if answer > 0 else "its answer"
        raise ValueError(
            f"a prompt has {prompt} tokens with {room}, and {limit} fit: the harness would cut it on the left without "
            f"a word; give max_length={prompt + answer} or more, or shorter prompts"
        )
