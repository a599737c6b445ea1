"""The attention blocks that a config can swap in.

A block takes q (B, N, H, D), k and v (B, N, Hkv, D) and the borders of packed documents, and gives (B, N, H, D). It is
causal, has no parameters, and says what it costs by ``flops``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .dilated import dilated_attention
from .masked import BlockSparse, SlidingWindow
from .pattern import DilationPattern


class Dilated(nn.Module):
    """Dilated attention over the levels of a pattern.

    ``operator`` computes it: ``dilated_attention``, or one that takes its place where a sequence is spread over ranks.
    """

    operator: Callable[..., Any] = staticmethod(dilated_attention)

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        heads: str = "all",
        shift: int = 0,
        backend: str = "auto",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.pattern = DilationPattern(tuple(segment_lengths), tuple(dilation_rates), heads, shift)
        self.backend = backend
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        out = self.operator(q, k, v, self.pattern, dropout_p=dropout_p, cu_seqlens=cu_seqlens, backend=self.backend)
        assert isinstance(out, Tensor)
        return out

    def flops(self, seq_len: int, num_heads: int, head_dim: int) -> int:
        """Floating-point operations of the two matrix products, forward."""
        return self.pattern.flops(seq_len, num_heads, head_dim)

    def extra_repr(self) -> str:
        return str(self.pattern)


class Dense(Dilated):
    """Ordinary attention: the operator with one level that holds any sequence."""

    def __init__(self, backend: str = "auto", dropout: float = 0.0) -> None:
        dense = DilationPattern.dense()
        super().__init__(dense.segment_lengths, dense.dilation_rates, backend=backend, dropout=dropout)


BLOCKS: dict[str, type[nn.Module]] = {
    "dense": Dense,
    "dilated": Dilated,
    "sliding_window": SlidingWindow,
    "block_sparse": BlockSparse,
}


def build_block(spec: Mapping[str, Any]) -> nn.Module:
    """The block that ``spec["name"]`` names, made with the rest of ``spec``."""
    options = dict(spec)
    name = options.pop("name", None)
    if name not in BLOCKS:
        nearest = difflib.get_close_matches(str(name), BLOCKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"attention block name={name!r}: expected one of {sorted(BLOCKS)}; nearest: {nearest!r}")
    try:
        return BLOCKS[name](**options)
    except TypeError as error:
        raise ValueError(f"attention block {name!r} with options {options}: {error}") from None
