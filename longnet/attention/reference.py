"""The truth: dilated attention written down as its definition, in O(N^2) time and memory.

Every other backend is tested against this one, on outputs and on gradients.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .pattern import DilationPattern


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilationPattern,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    documents: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over the multiset of keys that the levels show to each query.

    Args:
        q: (B, N, H, D); k and v are (B, N, Hkv, D).
        documents: borders of packed documents, from 0 to N.

    Returns:
        The output (B, N, H, D) in q's dtype and the LSE (B, N, H) in at least float32.
    """
    __, seq_len, num_heads, head_dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    counts = torch.zeros(num_heads, seq_len, seq_len, dtype=dtype, device=q.device)
    borders = documents or [0, seq_len]
    for begin, end in itertools.pairwise(borders):
        for head in range(num_heads):
            counts[head, begin:end, begin:end] = pattern.counts(end - begin, head, num_heads, causal, q.device)

    group = num_heads // k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        k, v = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
        scores = scale * torch.einsum("bnhd,bmhd->bhnm", q.to(dtype), k)
        scores = scores.masked_fill(counts == 0, -torch.inf)
        # A row that sees nothing has no maximum; any finite number keeps it, and its gradient, free of NaN.
        top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
        terms = counts * torch.exp(scores - top)
        total = terms.sum(-1, keepdim=True)
        seen = total > 0
        total = torch.where(seen, total, 1.0)
        weights = terms / total
        if dropout_p > 0.0:
            # Each of a key's copies is dropped by itself, as when the levels are computed one by one.
            kept = torch.binomial(counts, torch.full_like(counts, 1.0 - dropout_p))
            weights = weights * kept / (counts.clamp(min=1.0) * (1.0 - dropout_p))
        out = torch.einsum("bhnm,bmhd->bnhd", weights, v)
        lse = torch.where(seen, top + total.log(), -torch.inf).squeeze(-1)
    return out.to(q.dtype), lse.transpose(1, 2)
