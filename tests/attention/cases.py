"""Random cases of the operator, and how two computations of one case are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from longnet.attention import DilationPattern, dilated_attention


@dataclass(frozen=True)
class Case:
    pattern: DilationPattern
    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    documents: tuple[int, ...] | None
    seed: int

    def tensors(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
        """q, k, v; a random gradient of the output; a random gradient of the LSE."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

        row = (self.batch, self.seq_len)
        qkv = [draw(*row, heads, self.head_dim) for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        return [x.requires_grad_() for x in qkv], draw(*row, self.num_heads, self.head_dim), draw(*row, self.num_heads)


@st.composite
def patterns(draw: Any, max_length: int = 150) -> DilationPattern:
    levels = draw(
        st.lists(
            st.integers(1, max_length).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w))),
            min_size=1,
            max_size=4,
        )
    )
    return DilationPattern(
        tuple(w for w, _ in levels),
        tuple(r for _, r in levels),
        heads=draw(st.sampled_from(["all", "grouped"])),
        shift=draw(st.one_of(st.just(0), st.integers(0, 2 * max_length))),
    )


@st.composite
def cases(draw: Any, head_dims: tuple[int, ...] = (1, 3, 8, 16), max_seq_len: int = 200) -> Case:
    seq_len = draw(st.integers(1, max_seq_len))
    documents = None
    if draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, max_seq_len), max_size=4))
        documents = (0, *sorted(cut for cut in cuts if cut < seq_len), seq_len)
    num_kv_heads = draw(st.integers(1, 4))
    return Case(
        pattern=draw(patterns(max_length=max_seq_len)),
        batch=1 if documents else draw(st.integers(1, 3)),
        seq_len=seq_len,
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        causal=draw(st.booleans()),
        documents=documents,
        seed=draw(st.integers(0, 2**31)),
    )


def evaluate(case: Case, qkv: list[Tensor], grad: Tensor, grad_lse: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """Output, LSE and gradients of one computation of a case, in float64."""
    cu_seqlens = None if case.documents is None else torch.tensor(case.documents, device=grad.device)
    out, lse = dilated_attention(
        *qkv, case.pattern, causal=case.causal, cu_seqlens=cu_seqlens, return_lse=True, **options
    )
    seen = torch.isfinite(lse)
    loss = (out.double() * grad.double()).sum()
    if grad_lse is not None:
        loss = loss + (lse[seen].double() * grad_lse[seen].double()).sum()
    dq, dk, dv = torch.autograd.grad(loss, qkv)
    results = {"out": out, "lse": lse.masked_fill(~seen, 0.0), "seen": seen, "dq": dq, "dk": dk, "dv": dv}
    return {name: x.detach().double() for name, x in results.items()}


def worst_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error over all results, by norm, and where it is. NaN counts as infinite."""
    worst = (0.0, "nothing")
    for name, expected in truth.items():
        actual = found[name].to(expected.device)
        size = expected.norm().item()
        error = (actual - expected).norm().item() / (size if size > 0.0 else 1.0)
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst
