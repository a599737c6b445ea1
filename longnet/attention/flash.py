"""Attention over one block, forward to (out, LSE) and backward from them.

The library kernels keep the LSE of the softmax and take (out, LSE) back in their backward pass. Feeding them the
*merged* out and LSE of several blocks gives the exact gradient of the merged softmax, which is all that dilated
attention needs. These entry points are private to torch: they are named in this file only, and
``tests/attention/test_flash.py`` notices when they change.

All tensors are (B, L, H, D) with any strides over B, L and H; LSE is (B, L, H). H may be a multiple of k's heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class FlashKernel(Protocol):
    name: str
    # The largest causal block that is worth giving to this kernel whole; None where it skips the future by itself.
    causal_block: int | None

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        """Why this kernel cannot serve; None when it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _heads_first(*tensors: Tensor) -> Iterator[Tensor]:
    return (x.transpose(1, 2) for x in tensors)


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The random state that the kernels want even where they draw nothing from it."""
    return torch.zeros(2, dtype=torch.int64, device=device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class CpuFlash:
    name = "cpu flash"
    # It computes up to 512 keys for every query of a block and masks the future afterwards: at 512 rows a causal block
    # costs as much as a full one (measured: 11.6 useful GFLOP/s on a core, against 26 without a mask).
    causal_block: int | None = 64

    # Half precision is computed in float32: natively it measured 185 times slower, on a processor without bfloat16.
    @staticmethod
    def _heads_first(*tensors: Tensor) -> Iterator[Tensor]:
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return (x.transpose(1, 2).to(dtype) for x in tensors)

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        return None if q.device.type == "cpu" else f"needs a CPU tensor, got {q.device.type}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *self._heads_first(q, k, v), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *self._heads_first(grad, q, k, v, out, lse), 0.0, causal, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class _CudaKernel:
    """What the CUDA kernels share: half precision, and the head dimensions that they are built for."""

    name: str
    max_head_dim: int
    causal_block: int | None = None

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        if q.device.type != "cuda":
            return f"needs a CUDA tensor, got {q.device.type}"
        if _capability(q.device) < (8, 0):
            return "needs compute capability 8.0"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, got {q.dtype}"
        head_dim = q.shape[3]
        if head_dim % 8 or head_dim > self.max_head_dim:
            return f"needs a head dimension that is a multiple of 8 up to {self.max_head_dim}, got {head_dim}"
        return None


class CudnnFlash(_CudaKernel):
    name = "cudnn"
    max_head_dim = 128

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        if not torch.backends.cuda.cudnn_sdp_enabled() or not torch.backends.cudnn.is_available():
            return "cuDNN attention is switched off or missing"
        if q.shape[1] == 1 or k.shape[1] == 1:
            return "takes more than one row"
        return super().unsupported(q, k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.reshape(out.shape[:-1]).transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = _no_dropout(q.device)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(grad, q, k, v, out),
            lse.transpose(1, 2).contiguous().unsqueeze(-1),
            no_dropout, no_dropout, None, None, None, q.shape[1], k.shape[1], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CudaFlash(_CudaKernel):
    name = "flash"
    max_head_dim = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = _no_dropout(q.device)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *_heads_first(grad, q, k, v, out),
            lse.transpose(1, 2).contiguous(),
            None, None, q.shape[1], k.shape[1], 0.0, causal, no_dropout, no_dropout,
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CudaEfficient:
    """The memory-efficient kernel: float32 on a GPU. It knows no shared KV heads, so those are repeated."""

    name = "memory-efficient"
    causal_block: int | None = None

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        if q.device.type != "cuda":
            return f"needs a CUDA tensor, got {q.device.type}"
        if q.dtype != torch.float32:
            return f"serves float32, got {q.dtype}"
        head_dim = q.shape[3]
        return f"needs a head dimension that is a multiple of 4, got {head_dim}" if head_dim % 4 else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
        no_dropout = _no_dropout(q.device)
        # This kernel wants the LSE padded to 32 rows, and +inf makes the weights of the padding 0.
        padded = torch.nn.functional.pad(lse.transpose(1, 2), (0, -lse.shape[1] % 32), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *_heads_first(grad, q, k, v), None, out.transpose(1, 2), padded.contiguous(), no_dropout, no_dropout,
            0.0, [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Math:
    """Plain matrix products in chunks of queries: every device, dtype and head dimension, and dropout.

    The dropout mask is drawn again in backward from the same seed, so nothing of it is stored.
    """

    name = "math"
    causal_block: int | None = None
    chunk_elements = 2**24

    def __init__(self, dropout_p: float = 0.0, seed: int = 0) -> None:
        self.dropout_p = dropout_p
        self.seed = seed

    def unsupported(self, q: Tensor, k: Tensor) -> str | None:
        return None

    def _weights(
        self, q: Tensor, k: Tensor, lse: Tensor | None, causal: bool, scale: float
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """For each chunk of queries: its rows, its LSE, its weights and its weights after dropout."""
        batch, length, num_heads, _ = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        generator = torch.Generator(q.device).manual_seed(self.seed)
        chunk = max(1, self.chunk_elements // (batch * num_heads * k.shape[1]))
        position = torch.arange(max(length, k.shape[1]), device=q.device)
        for begin in range(0, length, chunk):
            rows = slice(begin, min(begin + chunk, length))
            q_BLKGD = q[:, rows].unflatten(2, (k.shape[2], -1)).to(dtype)
            scores = scale * torch.einsum("blkgd,bmkd->blkgm", q_BLKGD, k.to(dtype)).flatten(2, 3)
            if causal:
                future = position[rows, None] < position[None, : k.shape[1]]
                scores.masked_fill_(future[:, None, :], -torch.inf)
            lse_rows = scores.logsumexp(-1) if lse is None else lse[:, rows]
            weights = dropped = torch.exp(scores - lse_rows.unsqueeze(-1))
            if self.dropout_p:
                kept = torch.rand(weights.shape, generator=generator, device=q.device) >= self.dropout_p
                dropped = weights * kept / (1.0 - self.dropout_p)
            yield rows, lse_rows, weights, dropped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for _, lse, _, dropped in self._weights(q, k, None, causal, scale):
            grouped = dropped.unflatten(2, (k.shape[2], -1))
            outs.append(torch.einsum("blkgm,bmkd->blkgd", grouped, v.to(dropped.dtype)).flatten(2, 3))
            lses.append(lse)
        return torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        kv_heads = k.shape[2]
        k, v = k.to(dtype), v.to(dtype)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        dq = torch.empty(q.shape, dtype=dtype, device=q.device)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows, _, weights, dropped in self._weights(q, k, lse, causal, scale):
            grad_rows = grad[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
            q_rows = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
            dweights = torch.einsum("blkgd,bmkd->blkgm", grad_rows, v).flatten(2, 3)
            dscores = scale * (dropped * dweights - weights * delta[:, rows])
            dscores = dscores.unflatten(2, (kv_heads, -1))
            dq[:, rows] = torch.einsum("blkgm,bmkd->blkgd", dscores, k).flatten(2, 3)
            dk += torch.einsum("blkgm,blkgd->bmkd", dscores, q_rows)
            dv += torch.einsum("blkgm,blkgd->bmkd", dropped.unflatten(2, (kv_heads, -1)), grad_rows)
        return dq, dk, dv


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """What the host has worked out, sent without waiting for what the device still does."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@dataclass(frozen=True)
class Sequences:
    """Sequences one behind the other: their borders, on the host and on the device, and the longest one's length."""

    borders: tuple[int, ...]
    on_device: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Iterable[int], device: torch.device) -> Sequences:
        borders = tuple(accumulate(map(int, lengths), initial=0))
        longest = max(end - begin for begin, end in pairwise(borders))
        return cls(borders, to_device(torch.tensor(borders, dtype=torch.int32), device), longest)

    def parts(self, at_most: int) -> Iterator[tuple[slice, Sequences]]:
        """The same in parts of at most so many sequences, each with the rows it takes."""
        count = len(self.borders) - 1
        if count <= at_most:
            yield slice(None), self
            return
        for begin in range(0, count, at_most):
            some = self.borders[begin : begin + at_most + 1]
            own, on_device = (border - some[0] for border in some), self.on_device[begin : begin + len(some)] - some[0]
            yield slice(some[0], some[-1]), Sequences(tuple(own), on_device, self.longest)


class VarlenFlash:
    """FlashAttention over sequences in a row: q (R, H, D), k and v (R, Hkv, D), LSE (R, H). Serves as ``CudaFlash``.

    Args:
        window: how many of the latest positions a query sees, its own included; None sees all.
    """

    # A launch's grid holds 65,535, and backward pads each to a block of rows.
    most_sequences = 16384

    def __init__(self, window: int | None = None) -> None:
        self._window = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for rows, part in sequences.parts(self.most_sequences):
            out, lse, *_ = aten._flash_attention_forward(
                q[rows], k[rows], v[rows], part.on_device, part.on_device, part.longest, part.longest, 0.0, causal,
                False, scale=scale, **self._window,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse.T)
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_dropout, parts = _no_dropout(q.device), []
        for rows, part in sequences.parts(self.most_sequences):
            parts.append(
                aten._flash_attention_backward(
                    *(x[rows] for x in (grad, q, k, v, out)), lse[rows].T.contiguous(), part.on_device, part.on_device,
                    part.longest, part.longest, 0.0, causal, no_dropout, no_dropout, scale=scale,
                    **self._window,
                )
            )  # fmt: skip
        dq, dk, dv = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return dq, dk, dv


KERNELS: tuple[FlashKernel, ...] = (CpuFlash(), CudnnFlash(), CudaFlash(), CudaEfficient(), Math())


# Floating-point operations from which on a plan of cuDNN's is worth its milliseconds even if it is used in a few calls.
WORTH_A_PLAN = 1e12


def choose_kernel(q: Tensor, k: Tensor, once: bool = False) -> FlashKernel:
    """The first kernel, fastest first, that serves these tensors.

    Args:
        q: queries.
        k: keys.
        once: whether these sizes are not likely to come again. cuDNN makes a plan for every new size, which takes
            longer than all of a small block's attention.
    """
    work = 4 * q.shape[:3].numel() * k.shape[1] * q.shape[3]
    kernels = (x for x in KERNELS if not (once and work < WORTH_A_PLAN and isinstance(x, CudnnFlash)))
    return next(kernel for kernel in kernels if kernel.unsupported(q, k) is None)
