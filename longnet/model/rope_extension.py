"""RoPE for a longer context than a model was trained for: fields of its config, computed by transformers' own kinds."""

from __future__ import annotations

import difflib
from typing import Any

KINDS = ("keep", "linear", "ntk", "dynamic", "yarn", "base")


def extend_rope(config: Any, kind: str, context: int, theta: float | None = None) -> dict[str, Any]:
    """The fields ``max_position_embeddings`` and ``rope_parameters`` that take a model to a longer context.

    Args:
        config: of the model, a LongNet's or a transformers family's.
        kind: "keep" changes nothing but the context. "linear" is position interpolation: every position divided by the
            factor. "ntk" raises the base so that the slowest wave is stretched by the factor and the fastest stays.
            "dynamic" does so by the length at hand, beyond the original context, which therefore stays in the config.
            "yarn" divides the slow waves, leaves the fast ones, and sharpens the scores a little. "base" takes
            ``theta`` as the base.
        context: the new context, in positions.
        theta: for "base".

    Raises:
        ValueError: if the kind is unknown, theta is missing, or the context is shorter than the model's own.
    """
    if kind not in KINDS:
        nearest = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"rope={kind!r}: expected one of {list(KINDS)}; did you mean {nearest!r}?")
    rope = dict(config.rope_parameters)
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if kind == "keep":
        return {"max_position_embeddings": context, "rope_parameters": rope}
    if kind == "base":
        if theta is None or not theta > 0:
            raise ValueError(f"theta={theta!r}: expected a number above 0 with rope='base', for example 1e6")
        return {"max_position_embeddings": context, "rope_parameters": {**rope, "rope_theta": float(theta)}}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope={kind!r}: the model's positions are already scaled, by {rope['rope_type']!r}; expected 'keep' or "
            "'base'"
        )
    factor = context / original
    if factor < 1:
        raise ValueError(
            f"context={context} is shorter than the model's own: expected rope='keep', or at least {original} positions"
        )
    if kind == "ntk":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        # The formula of the dynamic kind at the length of the context.
        return {
            "max_position_embeddings": context,
            "rope_parameters": {**rope, "rope_theta": rope["rope_theta"] * factor ** (dim / (dim - 2))},
        }
    scaled = {**rope, "rope_type": kind, "factor": factor}
    if kind == "dynamic":
        return {"max_position_embeddings": original, "rope_parameters": {**scaled, "factor": 1.0}}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = original
    return {"max_position_embeddings": context, "rope_parameters": scaled}
