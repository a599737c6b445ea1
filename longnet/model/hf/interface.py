"""The operator in any decoder of transformers: ``attn_implementation="longnet"``.

The pattern comes from the model's config, under ``longnet``, and so from its config.json. Layers with a sliding window
keep it. Rows without padding or packing go through the fast operator; padded and packed ones, and steps behind a cache
of transformers, through explicit masks, which is exact and O(N^2): import a model as a LongNet where that matters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from longnet.attention import DilationPattern, dilated_attention

NAME = "longnet"
# Arguments by which a model asks for scores that the operator does not compute.
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def set_pattern(config: PretrainedConfig, segment_lengths: Any, dilation_rates: Any, **options: Any) -> None:
    """Puts a pattern into a model's config, where ``attn_implementation="longnet"`` looks for it.

    Args:
        config: of any decoder of transformers; of one with several parts, the text part is changed.
        segment_lengths: as in ``DilationPattern``; so is the rest.
    """
    pattern = DilationPattern(tuple(segment_lengths), tuple(dilation_rates), **options)
    config.get_text_config().longnet = pattern.to_config()


def pattern_of(config: PretrainedConfig) -> DilationPattern:
    """The pattern of a config."""
    found = getattr(config.get_text_config(), "longnet", None)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"attn_implementation='longnet': the config has longnet={found!r}; expected a pattern, for example "
            "config.longnet = {'segment_lengths': [2048, 8192], 'dilation_rates': [1, 4]} before the model is loaded"
        )
    return DilationPattern.from_config(found)


def longnet_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (B, H, M, D), k and v (B, Hkv, N, D), the last M of N positions."""
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(
            f"attn_implementation='longnet': {type(module).__name__} looks both ways, or at another text; expected a "
            "decoder's self-attention"
        )
    if found := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"attn_implementation='longnet': {type(module).__name__} needs {found}, which it cannot do")
    if sliding_window is not None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    config: Any = module.config
    pattern = pattern_of(config)
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None and rows == keys:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        result = dilated_attention(q, k, v, pattern, scale=scaling, dropout_p=dropout)
        assert isinstance(result, Tensor)
        return result, None
    bias = _bias(pattern, attention_mask, query, keys)
    # A row that sees nothing would be NaN; it takes any key, and is 0 afterwards.
    blind = bias.isneginf().all(-1, keepdim=True)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, bias.masked_fill(blind, 0.0), dropout_p=dropout, scale=scaling
    )
    return out.masked_fill(blind, 0.0).transpose(1, 2).contiguous(), None


def _bias(pattern: DilationPattern, mask: Tensor | None, query: Tensor, num_keys: int) -> Tensor:
    """The log of how often each query sees each key, (B, H, M, N), which added to the scores weighs them as levels do.

    A query's position is that of the last key that its row of the mask shows; positions count from the first such key,
    which is where its document begins.
    """
    num_heads, rows = query.shape[1:3]
    m = torch.arange(num_keys, device=query.device)[None, None, :]
    if mask is None:
        seen = m <= torch.arange(num_keys - rows, num_keys, device=query.device)[None, :, None]
    else:
        seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    places = seen.to(torch.int8)
    start = places.argmax(-1, keepdim=True)
    n = num_keys - 1 - places.flip(-1).argmax(-1, keepdim=True)
    n, m = n - start + pattern.shift, m - start + pattern.shift
    counts = torch.zeros(seen.shape[0], num_heads, rows, num_keys, device=query.device, dtype=query.dtype)
    for level, (length, rate) in enumerate(pattern.levels):
        together = seen & (n // length == m // length)
        for phase, heads in pattern.head_groups(level, num_heads):
            rows_of = (n % length % rate == phase) & (m % length % rate == phase)
            counts[:, list(heads)] += (together & rows_of)[:, None]
    return counts.log()


def longnet_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask function: none at all where rows are whole, since the operator is causal by itself."""
    config = kwargs.get("config")
    code = type(config).__module__.replace(".configuration_", ".modeling_")
    if code in sys.modules and not hasattr(sys.modules[code], "ALL_ATTENTION_FUNCTIONS"):
        # It would take the missing mask for leave to see everything.
        raise ValueError(
            f"attn_implementation='longnet': the code of {getattr(config, 'model_type', config)!r} computes attention "
            "itself; expected a decoder that asks transformers' AttentionInterface for it"
        )
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(NAME, longnet_attention)
AttentionMaskInterface.register(NAME, longnet_mask)
