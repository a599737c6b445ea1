"""Rotary positions, by global position: RoPE with transformers' scaling types, and xPos.

B batch, N positions, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .config import LongNetConfig

XPOS_GAMMA = 0.4
# float16 ends at 2**16, and queries and keys need a share of that for themselves.
XPOS_FLOAT16_BITS = 8


class Rotation(NamedTuple):
    """What turns queries and keys: cosines and sines (B or 1, N, 1, F) in float32, each times a scale for xPos."""

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + F) of x (B, N, H, D); dimensions beyond 2 F, of a partial rotation, stay."""
    frequencies = cos.shape[-1]
    first, second, rest = x.split((frequencies, frequencies, x.shape[-1] - 2 * frequencies), -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def document_positions(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Positions (1, N) that restart at every border."""
    positions = torch.arange(seq_len, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, positions, right=True) - 1
    return (positions - cu_seqlens[document])[None]


class LongNetRotaryEmbedding(nn.Module):
    """Makes the rotation of every position, once for all layers.

    Angles are computed in float64: in float32 the product of position and frequency is off by 0.06 rad at a million
    tokens, and by a whole rad at sixteen million.

    xPos multiplies a score over distance d by ``zeta ** (d / base)``, with one zeta in (0.28, 1) for each frequency: it
    scales the query at n by ``zeta ** ((n - c) / base)`` and the key by the inverse. The centre c drops out of every
    score; half the context keeps the factors smallest. It is a constant of the config, never of the input, so that
    shards and documents agree on it. The factors reach ``zeta ** -(context / (2 base))``: within bfloat16 and float32
    for every config that is accepted, within float16 up to a context of 8 times the base, beyond which it is refused.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        assert config.rope_parameters is not None
        self.config = config
        # These names are those that transformers' scaling types and its loading of weights look for.
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: LongNetConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
        assert config.rope_parameters is not None
        assert config.head_dim is not None
        dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LongNetRotaryEmbedding:
        # A model cast to bfloat16 must not turn by frequencies of 8 bits.
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            before = exact[name]
            if buffer is not None and before is not None and buffer.dtype != before.dtype:
                self._buffers[name] = before.to(buffer.device)
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        positions = position_ids.to(device=x.device, dtype=exact)[..., None, None]
        angles = positions * self.inv_freq.to(device=x.device, dtype=exact)
        cos, sin = (wave * self.attention_scaling for wave in (angles.cos().float(), angles.sin().float()))
        if self.config.position_embedding == "rope":
            return Rotation(cos, sin, cos, sin)
        scale = self._xpos_scale(x, positions)
        return Rotation(cos * scale, sin * scale, cos / scale, sin / scale)

    def _xpos_scale(self, x: Tensor, positions: Tensor) -> Tensor:
        context, base = self.config.max_position_embeddings, self.config.xpos_scale_base
        assert base is not None
        bits = context / (2 * base) * math.log2((1 + XPOS_GAMMA) / XPOS_GAMMA)
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        if dtype == torch.float16 and bits > XPOS_FLOAT16_BITS:
            raise ValueError(
                f"position_embedding='xpos' in float16 at max_position_embeddings={context}: its factors reach "
                f"2**{bits:.0f}; use bfloat16, or xpos_scale_base >= {math.ceil(base * bits / XPOS_FLOAT16_BITS)}"
            )
        frequencies = self.inv_freq.shape[0]
        fraction = torch.arange(frequencies, device=x.device, dtype=positions.dtype) / frequencies
        zeta = (fraction + XPOS_GAMMA) / (1 + XPOS_GAMMA)
        return (zeta ** ((positions - context / 2) / base)).float()
