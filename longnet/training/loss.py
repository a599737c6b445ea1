"""Cross entropy of a linear head, without its logits.

The (tokens, vocabulary) matrix is made a few rows at a time and each part is gone before the next. Gradients are
computed on the way, in the forward pass, where the logits are at hand; backward only scales them.

Torch's own chunked ``linear_cross_entropy`` is not used: it begins with torch 2.13, has no z-loss, and for bfloat16
inputs gives the loss in bfloat16 (0.6 % off for a sum over 4096 tokens) and adds up the weight's gradient in it. Nor is
liger-kernel's: on an H200 with 32K tokens it took 1.45 times as long as the fused backend at a vocabulary of 50K, and
as long at 128K (`scripts/benchmark_kernels.py`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BACKENDS = ("auto", "chunked", "fused")

# A chunk of 256 MiB in float32: enough rows for fast matrix products at the largest vocabularies.
CHUNK_ELEMENTS = 2**26
# Small vocabularies would otherwise fit whole into one chunk.
MIN_CHUNKS = 8


class LossSums(NamedTuple):
    """Sums over the tokens that count; the caller divides. Only ``loss`` carries a gradient."""

    loss: Tensor
    nll: Tensor
    tokens: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> LossSums:
    """Cross entropy of the logits ``hidden @ weight.T`` against labels, never holding all logits.

    Args:
        hidden: (T, C).
        weight: (V, C), of the head; may be the embedding's too.
        labels: (T,) integers in [0, V), or ``ignore_index`` where nothing is to be predicted.
        ignore_index: the label that is left out.
        z_loss: factor of the squared log of the softmax denominators, which keeps logits from drifting.
        chunk_rows: rows of logits held at a time by the "chunked" backend; chosen by size when None.
        backend: "chunked" (plain torch: any device and dtype), "fused" (a Triton kernel in the logits' own memory), or
            "auto": fused on CUDA, where Triton is installed.

    Returns:
        ``loss`` (z-loss included), ``nll`` (without) and the number of ``tokens``, in float32, or float64 for float64
        inputs. With no token that counts the sums and the gradients are 0.
    """
    _check(hidden, weight, labels, chunk_rows, backend)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    fused = backend == "fused" or (backend == "auto" and _fused_serves(hidden))
    rows = chunk_rows or _rows_per_chunk(hidden.shape[0], weight.shape[0], fused)
    grads = torch.is_grad_enabled()
    needs = (grads and hidden.requires_grad, grads and weight.requires_grad)
    return LossSums(*_ChunkedLoss.apply(hidden, weight, labels, ignore_index, z_loss, rows, fused, needs))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        z_loss: float,
        rows: int,
        fused: bool,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        loss, nll, tokens = (torch.zeros((), dtype=exact, device=hidden.device) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], rows):
                part = slice(begin, begin + rows)
                logits, label = hidden[part] @ head.T, labels[part]
                of_rows = _fused_rows if fused else _rows
                lse, part_nll, grad = of_rows(logits, label, ignore_index, z_loss, any(needs))
                part_nll = part_nll.sum()
                nll += part_nll
                loss += part_nll + z_loss * lse.square().sum()
                tokens += (label != ignore_index).sum()
                if grad is None:
                    continue
                del logits
                if grad_hidden is not None:
                    torch.mm(grad, head, out=grad_hidden[part])
                if grad_weight is not None:
                    _add_product_(grad_weight, grad.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll, tokens)
        return loss, nll, tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because a second copy of the weight's gradient would come at the step's peak of memory. A second
        # backward through the same graph is then refused by autograd's own check of saved tensors.
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden.mul_(grad_loss)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _rows(
    logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float, grads: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each row's LSE, negative log-likelihood and gradient by the logits; 0 where nothing counts."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    counts = (labels != ignore_index).to(exact)[:, None]
    index = torch.where(labels == ignore_index, 0, labels)[:, None]
    exact_logits = logits.to(exact)
    lse = exact_logits.logsumexp(-1, keepdim=True)
    nll = (lse - exact_logits.gather(-1, index)) * counts
    if not grads:
        return lse * counts, nll, None
    # In their own place: (1 + 2 z lse) softmax - onehot.
    grad = exact_logits.sub_(lse).exp_().mul_((1 + 2 * z_loss * lse) * counts)
    return lse * counts, nll, grad.scatter_add_(-1, index, -counts).to(logits.dtype)


def _fused_rows(
    logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float, grads: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    from .cross_entropy_kernel import cross_entropy_

    lse, nll = cross_entropy_(logits, labels, ignore_index, z_loss, grads)
    return lse, nll, logits if grads else None


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to the total, with no rounding in between."""
    if total.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _rows_per_chunk(num_tokens: int, vocab_size: int, fused: bool) -> int:
    # The fused kernel has no copy in float32, and gains 8 % by larger products at a vocabulary of 128K.
    elements = 4 * CHUNK_ELEMENTS if fused else CHUNK_ELEMENTS
    rows = max(1, min(elements // vocab_size, -(-num_tokens // MIN_CHUNKS)))
    # Matrix products are fastest over whole tiles of rows.
    return rows // 256 * 256 or rows


def _fused_serves(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton") is not None


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int | None, backend: str) -> None:
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}: expected (tokens, C) and "
            f"(tokens,); try hidden.flatten(0, -2) and labels.flatten()"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: expected (vocabulary, {hidden.shape[1]})")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: expected torch.int64; try labels.long()")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows}: expected at least 1, or None to choose by size")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {list(BACKENDS)}")
