"""The operator: checks what it is given, picks a backend, computes."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import fused
from .flash import choose_kernel
from .levels import attend_by_levels
from .pattern import DilationPattern
from .reference import reference_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """A way to compute the operator.

    ``unsupported(q, k)`` is the reason why it cannot serve these tensors, or None; ``describe(q, k, dropout_p)`` says
    how it would.
    """

    unsupported: Callable[[Tensor, Tensor], str | None]
    describe: Callable[[Tensor, Tensor, float], str]


# Score matrices of 1 GiB in float32: beyond this the truth is too large to be meant.
REFERENCE_LIMIT = 2**28


def _reference_unsupported(q: Tensor, k: Tensor) -> str | None:
    batch, seq_len, num_heads, _ = q.shape
    if batch * num_heads * seq_len**2 > REFERENCE_LIMIT:
        return f"it holds all scores at once, B*H*N*N = {batch * num_heads * seq_len**2} of them; use 'sdpa'"
    return None


def _describe_sdpa(q: Tensor, k: Tensor, dropout_p: float) -> str:
    if dropout_p > 0.0:
        return "levels through chunked matrix products, since the flash kernels keep no dropout mask"
    kernel = choose_kernel(q, k)
    folded = ", folded in one pass" if fused.unsupported(q) is None else ""
    return f"levels through the {kernel.name} kernel, the fastest here for {q.dtype} on {q.device.type}{folded}"


# In the order in which `auto` tries them.
BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(unsupported=lambda q, k: None, describe=_describe_sdpa),
    "reference": Backend(_reference_unsupported, lambda q, k, dropout_p: "the O(N^2) definition"),
}


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilationPattern,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the keys that a dilation pattern shows, exact in value and gradient.

    One softmax runs over the multiset union of the keys of all levels. A position that no level covers gives 0, with
    LSE -inf and gradient 0.

    Args:
        q: (B, N, H, D).
        k: (B, N, Hkv, D) with H a multiple of Hkv.
        v: like k.
        pattern: which keys a query sees.
        causal: no query sees a later key.
        scale: of the scores; 1/sqrt(D) by default.
        dropout_p: probability of dropping an attention weight; give 0 outside of training.
        cu_seqlens: borders (documents + 1,) of the documents packed into a row, from 0 to N, for B == 1. Each gives
            exactly what it would give alone.
        backend: "auto" or a name of ``BACKENDS``; ``explain_backend`` says what "auto" picks.
        return_lse: also return the log of the softmax denominators.

    Returns:
        The output (B, N, H, D), and with ``return_lse`` the LSE (B, N, H) in float32 (float64 for float64 inputs).
    """
    q, k, v = checked_inputs(q, k, v, pattern, dropout_p, scale)
    documents = None if cu_seqlens is None else _check_documents(cu_seqlens, q)
    name, _ = _choose_backend(backend, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if name == "reference":
        borders = None if documents is None else documents.tolist()
        out, lse = reference_attention(q, k, v, pattern, causal, scale, dropout_p, borders)
    else:
        out, lse = attend_by_levels(q, k, v, pattern, causal, scale, dropout_p, documents)
    return (out, lse) if return_lse else out


def checked_inputs(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilationPattern, dropout_p: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the kernels take them; ValueError where they or the options do not fit together."""
    _check_shapes(q, k, v)
    q, k, v = autocast(q, k, v)
    _check_dtypes(q, k, v)
    _check_options(pattern, dropout_p, scale)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def explain_backend(q: Tensor, k: Tensor, backend: str = "auto", dropout_p: float = 0.0) -> str:
    """Which backend serves these tensors, how, and why not the others."""
    name, refused = _choose_backend(backend, q, k)
    why = "".join(f"; not {other!r}: {reason}" for other, reason in refused.items())
    return f"{name}: {BACKENDS[name].describe(q, k, dropout_p)}{why}"


def _choose_backend(backend: str, q: Tensor, k: Tensor) -> tuple[str, dict[str, str]]:
    if backend != "auto":
        if backend not in BACKENDS:
            nearest = difflib.get_close_matches(backend, BACKENDS, n=1, cutoff=0.0)[0]
            raise ValueError(f"backend={backend!r}: expected 'auto' or one of {list(BACKENDS)}; nearest: {nearest!r}")
        if reason := BACKENDS[backend].unsupported(q, k):
            raise ValueError(f"backend={backend!r} cannot do this: {reason}")
        return backend, {}
    refused: dict[str, str] = {}
    for name, candidate in BACKENDS.items():
        reason = candidate.unsupported(q, k)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise ValueError(f"no backend can do this: {refused}")


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in the autocast dtype where autocast is on, as torch's own attention does it."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            hint = "; add a batch dimension with unsqueeze(0)" if x.dim() == 3 else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected (batch, positions, heads, head_dim){hint}")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected that of k, {tuple(k.shape)}")
    batch, seq_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    if (k.shape[0], k.shape[1], k.shape[3]) != (batch, seq_len, head_dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}: expected ({batch}, {seq_len}, KV heads, {head_dim}) to go with "
            f"q of shape {tuple(q.shape)}"
        )
    if 0 in q.shape or num_kv_heads == 0:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected no empty dimension")
    if num_heads % num_kv_heads:
        nearest = min((n for n in range(1, num_heads + 1) if num_heads % n == 0), key=lambda n: abs(n - num_kv_heads))
        raise ValueError(
            f"k has {num_kv_heads} heads: expected a divisor of q's {num_heads} heads; the nearest is {nearest}"
        )
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}: expected q's device, {q.device}; try {name}.to(q.device)")


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}: expected q's, {q.dtype}; try {name}.to(q.dtype)")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}: expected one of {DTYPES}; try q.float()")


def _check_options(pattern: DilationPattern, dropout_p: float, scale: float | None) -> None:
    if not isinstance(pattern, DilationPattern):
        raise ValueError(
            f"pattern={pattern!r}: expected a DilationPattern, for example DilationPattern.geometric(context=8192)"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: expected 0 <= p < 1; nearest: {max(0.0, min(dropout_p, 0.99))}")
    if scale is not None and not scale > 0.0:
        raise ValueError(f"scale={scale}: expected a positive number, or None for 1/sqrt(head_dim)")


def _check_documents(cu_seqlens: Tensor, q: Tensor) -> Tensor:
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs packed rows with batch 1, got q of shape {tuple(q.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}: expected integers of shape "
            f"(documents + 1,), for example [0, {q.shape[1]}]"
        )
    # Reading the values of a traced or a device tensor would break the graph or wait for the device.
    if not torch.compiler.is_compiling() and cu_seqlens.device.type == "cpu":
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] != q.shape[1] or any(a >= b for a, b in itertools.pairwise(borders)):
            raise ValueError(
                f"cu_seqlens={borders}: expected rising borders from 0 to the row's {q.shape[1]} positions, "
                f"for example {sorted({0, *(b for b in borders if 0 < b < q.shape[1]), q.shape[1]})}"
            )
    return cu_seqlens
