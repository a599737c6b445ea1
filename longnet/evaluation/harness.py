"""lm-eval on a LongNet, without its silent cut of prompts that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
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
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
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

    def generate_until(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        lengths = []
        for prompt, wanted in (request.args for request in requests):
            answer = normalize_gen_kwargs(wanted, self.max_gen_toks)["max_gen_toks"]
            lengths.append((self.tok_batch_encode([prompt])[0].shape[1], answer))
        self._check(lengths)
        return super().generate_until(requests, *args, **options)

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        # The last token is predicted, and never read.
        self._check([(len(context), len(rest) - 1) for _, context, rest in requests])
        return super()._loglikelihood_tokens(requests, *args, **options)

    def _check(self, lengths: list[tuple[int, int]]) -> None:
        # All of them before the first is read: in the middle of a long evaluation it would be late to hear of it.
        prompt, answer = max(lengths, key=sum, default=(0, 0))
        if prompt + answer > self.max_length:
            raise ValueError(
                f"a prompt of {prompt} tokens and an answer of {answer} are longer than max_length={self.max_length}: "
                f"the harness would cut the prompt on the left; give max_length={prompt + answer} or shorter prompts"
            )
