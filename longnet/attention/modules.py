"""Dilated attention as modules: the bare operator, and a drop-in for nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from .dilated import dilated_attention
from .pattern import DilationPattern


class DilatedAttention(nn.Module):
    """Dilated attention over q, k, v of shape (batch, positions, heads, head_dim).

    Args:
        segment_lengths: w of each level.
        dilation_rates: r of each level.
        softmax_scale: of the scores; 1/sqrt(head_dim) by default.
        attention_dropout: probability of dropping an attention weight, in training only.
        heads: "all" or "grouped", see ``DilationPattern``.
        shift: see ``DilationPattern``.
        backend: see ``dilated_attention``.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        heads: str = "all",
        shift: int = 0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.pattern = DilationPattern(tuple(segment_lengths), tuple(dilation_rates), heads, shift)
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"dropout={attention_dropout}: expected a probability from 0 to below 1")
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.backend = backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        out = dilated_attention(
            q,
            k,
            v,
            self.pattern,
            causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        return str(self.pattern)


class MultiheadDilatedAttention(nn.Module):
    """Dilated self-attention with projections, in the place of ``nn.MultiheadAttention(batch_first=True)``.

    Parameters have the names and shapes of nn.MultiheadAttention, so its state dict loads here. The attention weights
    are never formed: the second result is always None; asking for it, and masks other than ``is_causal``, are refused.

    Args:
        embed_dim: width of the model, a multiple of num_heads.
        num_heads: number of attention heads.
        segment_lengths: w of each level.
        dilation_rates: r of each level.
        dropout: of the attention weights, in training only.
        bias: whether the projections have biases.
        layer_norm: a LayerNorm before the output projection, as in MAGNETO.
        layer_norm_eps: of that LayerNorm.
        heads: "all" or "grouped", see ``DilationPattern``.
        shift: see ``DilationPattern``.
        backend: see ``dilated_attention``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        heads: str = "all",
        shift: int = 0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            nearest = min((n for n in range(1, embed_dim + 1) if embed_dim % n == 0), key=lambda n: abs(n - num_heads))
            raise ValueError(f"num_heads={num_heads}: expected a divisor of embed_dim={embed_dim}; nearest: {nearest}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = True
        # Keeps nn.TransformerEncoderLayer from computing dense attention with the weights by itself.
        self._qkv_same_embed_dim = False
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **factory) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, attention_dropout=dropout, heads=heads, shift=shift, backend=backend
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial weights as nn.MultiheadAttention draws them."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if need_weights:
            raise ValueError("need_weights=True: attention weights are never formed; expected False")
        if attn_mask is not None:
            raise ValueError("attn_mask is given: the pattern is the mask; use is_causal=True for a causal one")
        if key_padding_mask is not None:
            raise ValueError("key_padding_mask is given: pack the sequences into one row instead and pass cu_seqlens")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.embed_dim:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected (batch, positions, embed_dim={self.embed_dim})"
                )
        if query is key and key is value:
            q, k, v = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (rearrange(x, "b n (h d) -> b n h d", h=self.num_heads) for x in (q, k, v))
        out = rearrange(self.attention(q, k, v, is_causal=is_causal, cu_seqlens=cu_seqlens), "b n h d -> b n (h d)")
        if self.norm is not None:
            out = self.norm(out)
        return self.out_proj(out), None
