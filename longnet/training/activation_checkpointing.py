"""Activation checkpointing: which of a layer's activations are kept for backward, and which are computed again."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from longnet.model import LongNetForCausalLM, LongNetModel

from .offload import HostStore
from .tiling import Keep, LayerTiles, PositionTiles

KINDS = ("none", "selective", "full", "offload")

# The attention of each block: the costliest part of a layer to compute again, and one of the smallest to keep.
KEPT_OPS = frozenset({
    "longnet::dilated_forward",
    "longnet::sequence_parallel_forward",
    "longnet::ulysses_forward",
    "longnet::window_forward",
    "flex_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
})  # fmt: skip


# Kept by a layer that is worked through in tiles.
KEPT_BY_TILES: dict[str, Keep] = {"none": "attention", "selective": "output", "full": "input", "offload": "input"}


def apply(
    model: LongNetForCausalLM | LongNetModel,
    kind: str,
    every: int = 1,
    tile: int | None = None,
    compiled: bool = False,
) -> None:
    """Sets what the layers keep for backward. Names, weights and gradients stay the same.

    Args:
        model: changed in place; a second call replaces the first.
        kind: "none" keeps everything; "full" keeps a layer's input and computes the rest again in backward;
            "selective" keeps the attention's output too, so that only the cheap rest is computed again; "offload" is
            "full" with the layers' inputs in host memory.
        every: checkpoint layers 0, every, 2 * every, ... and let the others keep everything.
        tile: positions that the layers, the embedding and the last norm work on at a time, see ``tiling``; None for
            all. Whatever the kind, only the attention's inputs and its output are then kept, and the rest is computed
            again.
        compiled: compile the layers, or the code of a tile where there are tiles.
    """
    if kind not in KINDS:
        nearest = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"kind={kind!r}: expected one of {list(KINDS)}; did you mean {nearest!r}?")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: expected an integer >= 1; 1 checkpoints all layers")
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ValueError(f"tile={tile!r}: expected an integer >= 1, or None for the whole sequence at once")
    decoder = model.model if isinstance(model, LongNetForCausalLM) else model
    # One object for all layers: compiled layers share their code only where they share what they call.
    recompute = _recompute(kind)
    store = HostStore() if kind == "offload" else None
    checkpointed = LayerTiles(tile, KEPT_BY_TILES[kind], store, compiled) if tile or store else None
    others = LayerTiles(tile, "attention", None, compiled) if tile else None
    decoder.tiles = PositionTiles(tile) if tile else None
    for number, layer in enumerate(decoder.layers):
        chosen = number % every == 0
        layer.recompute = recompute if chosen else None
        layer.tiles = checkpointed if chosen else others
        layer._compiled_call_impl = None
        if compiled and layer.tiles is None:
            layer.compile()


def apply_to_decoder(model: PreTrainedModel, kind: str, compiled: bool) -> None:
    """The same for a decoder of transformers, which checkpoints by itself: "none" or "full"."""
    if kind == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif kind != "none":
        raise ValueError(f"kind={kind!r}: {type(model).__name__} is not our own; expected 'none' or 'full'")
    if compiled:
        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or []):
                module.compile()


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
