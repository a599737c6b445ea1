"""The decoder layer: attention by a swappable block, and the MLP, each added to the residual stream.

B batch, N positions, H query heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from longnet.attention import build_block
from longnet.attention.incremental import Past

from .config import LongNetConfig
from .rope import Rotation, rotate


def build_norm(config: LongNetConfig, size: int) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(size, eps=config.norm_eps)


class Projection(nn.Linear):
    """A linear map inside a layer; ``raised`` ones begin larger in deep models under MAGNETO's initialization."""

    def __init__(self, config: LongNetConfig, size_in: int, size_out: int, bias: bool, raised: bool = True) -> None:
        super().__init__(size_in, size_out, bias=bias)
        self.magneto_gain = math.sqrt(math.log(2 * config.num_hidden_layers)) if raised else 1.0


class LongNetAttention(nn.Module):
    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        inner, inner_kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Projection(config, hidden, inner, bias, raised=False)
        self.k_proj = Projection(config, hidden, inner_kv, bias, raised=False)
        self.v_proj = Projection(config, hidden, inner_kv, bias)
        self.o_proj = Projection(config, inner, hidden, bool(config.attention_output_bias))
        self.q_norm = build_norm(config, self.head_dim) if config.query_key_norm else nn.Identity()
        self.k_norm = build_norm(config, self.head_dim) if config.query_key_norm else nn.Identity()
        self.sub_layernorm = build_norm(config, inner) if config.sub_layernorm else nn.Identity()
        self.block = build_block(config.block_spec(layer))

    def project_in(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q = rotate(q, rotation.query_cos, rotation.query_sin)
            k = rotate(k, rotation.key_cos, rotation.key_sin)
        return q, k, v

    def project_out(self, attended: Tensor) -> Tensor:
        out: Tensor = self.o_proj(self.sub_layernorm(attended.flatten(-2)))
        return out


class LongNetMLP(nn.Module):
    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Projection(config, hidden, inner, bias) if config.gated_mlp else None
        self.up_proj = Projection(config, hidden, inner, bias)
        self.down_proj = Projection(config, inner, hidden, bias)
        self.sub_layernorm = build_norm(config, inner) if config.sub_layernorm else nn.Identity()
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up_proj(hidden)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(hidden)) * up
        out: Tensor = self.down_proj(self.sub_layernorm(inner))
        return out


class LongNetDecoderLayer(nn.Module):
    """Pre-norm attention and MLP.

    Only ``attend`` looks across positions. What comes before it and after it works on each position alone, so on any
    part of the sequence.

    ``recompute`` is how activation checkpointing enters: called as ``recompute(function, *inputs)`` in training, it
    gives the function's output and decides what is kept for backward. It is inside ``forward``, so that a layer that
    is compiled compiles it too, and it holds no reference to the layer, so that a copied layer stays whole.
    ``tiles``, called as ``tiles(layer, *inputs)``, takes the place of the whole forward pass.
    """

    recompute: Callable[..., Tensor] | None = None
    tiles: Callable[..., Tensor] | None = None

    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = LongNetAttention(config, layer)
        self.mlp = LongNetMLP(config)
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.post_attention_layernorm = build_norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, cu_seqlens: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        if self.tiles is not None and past is None:
            return self.tiles(self, hidden, rotation, cu_seqlens)
        if self.recompute is not None and torch.is_grad_enabled():
            return self.recompute(self._forward, hidden, rotation, cu_seqlens, past)
        return self._forward(hidden, rotation, cu_seqlens, past)

    def _forward(
        self, hidden: Tensor, rotation: Rotation | None, cu_seqlens: Tensor | None, past: Past | None
    ) -> Tensor:
        return self.after_attention(hidden, self.attend(*self.before_attention(hidden, rotation), cu_seqlens, past))

    def before_attention(self, hidden: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, in (B, N, H, D)."""
        return self.self_attn.project_in(self.input_layernorm(hidden), rotation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, past: Past | None = None) -> Tensor:
        attended: Tensor = self.self_attn.block(q, k, v, cu_seqlens) if past is None else past.attend(q, k, v)
        return attended

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and what the attention block gave."""
        hidden = hidden + self.dropout(self.self_attn.project_out(attended))
        return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
