"""Activation checkpointing: which of a layer's activations are kept for backward, and which are computed again."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longnet.model import LongNetForCausalLM, LongNetModel

KINDS = ("none", "full", "selective")

# The attention of each block: the costliest part of a layer to compute again, and one of the smallest to keep.
KEPT_OPS = frozenset({
    "longnet::dilated_forward",
    "flex_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
})  # fmt: skip


def apply(model: LongNetForCausalLM | LongNetModel, kind: str, every: int = 1) -> None:
    """Sets what the layers keep for backward. Names, weights and gradients stay the same.

    A layer is checkpointed inside its ``forward``: compile layers (``layer.compile()``) before or after, as you like.

    Args:
        model: changed in place; a second call replaces the first.
        kind: "none" keeps everything; "full" keeps a layer's input and computes the rest again in backward;
            "selective" keeps the attention's output too, so that only the cheap rest is computed again.
        every: checkpoint layers 0, every, 2 * every, ... and let the others keep everything.
    """
    if kind not in KINDS:
        nearest = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"kind={kind!r}: expected one of {list(KINDS)}; did you mean {nearest!r}?")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: expected an integer >= 1; 1 checkpoints all layers")
    decoder = model.model if isinstance(model, LongNetForCausalLM) else model
    # One object for all layers: compiled layers share their code only where they share what they call.
    recompute = _recompute(kind)
    for number, layer in enumerate(decoder.layers):
        layer.recompute = recompute if number % every == 0 else None


def _recompute(kind: str) -> Callable[..., Tensor] | None:
    match kind:
        case "full":
            return partial(checkpoint, use_reentrant=False)
        case "selective":
            return partial(
                checkpoint,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, _keep_attention),
            )
        case _:
            return None


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
