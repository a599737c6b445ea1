"""Cross entropy and its gradient, row by row, in the logits' own memory. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _rows_kernel(
    logits, labels, lse, nll, stride, ignore_index, z_loss,
    VOCABULARY: tl.constexpr, GRADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    counts = label != ignore_index
    top = float("-inf")
    total = 0.0
    for begin in range(0, VOCABULARY, BLOCK):
        x = tl.load(logits + begin + columns, mask=begin + columns < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
        top = higher
    row_lse = top + tl.log(total)
    own = tl.load(logits + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(lse + row, tl.where(counts, row_lse, 0.0))
    tl.store(nll + row, tl.where(counts, row_lse - own, 0.0))
    if GRADS:
        factor = tl.where(counts, 1 + 2 * z_loss * row_lse, 0.0)
        for begin in range(0, VOCABULARY, BLOCK):
            inside = begin + columns < VOCABULARY
            x = tl.load(logits + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - row_lse) * factor - tl.where((begin + columns == label) & counts, 1.0, 0.0)
            tl.store(logits + begin + columns, grad.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float, grads: bool
) -> tuple[Tensor, Tensor]:
    """LSE and negative log-likelihood of each row, in float32, 0 where the label is left out.

    With ``grads`` the logits are overwritten by the gradient of ``sum(nll + z_loss * lse ** 2)``.
    """
    rows, vocab_size = logits.shape
    lse, nll = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _rows_kernel[(rows,)](
        logits, labels, lse, nll, logits.stride(0), ignore_index, z_loss,
        VOCABULARY=vocab_size, GRADS=grads, BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)), num_warps=8,
    )  # fmt: skip
    return lse, nll
