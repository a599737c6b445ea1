"""Packed documents and windows by the varlen kernel: itself on a GPU, and elsewhere one that is written out here."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from longnet.attention import DilationPattern, build_block, dilated_attention, flash, fused, levels, packed, window
from longnet.attention.flash import Sequences, VarlenFlash

from .cases import Case, cases, evaluate, worst_error


def weights(q: Tensor, k: Tensor, causal: bool, scale: float, reach: int | None) -> Tensor:
    """Scores (H, L, L) of one sequence."""
    scores = scale * torch.einsum("lhd,mhd->hlm", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    n, m = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    seen = (m <= n) if causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if reach is not None:
        seen &= n - m <= reach
    return scores.masked_fill(~seen, -torch.inf)


def plain_forward(q: Any, k: Any, v: Any, ends: Any, _: Any, longest: int, __: int, dropout: float, causal: bool,
                  debug: bool, *, scale: float, window_size_left: Any = None,
                  window_size_right: Any = None) -> Any:  # fmt: skip
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for begin, end in pairwise(ends.tolist()):
        assert 0 <= end - begin <= longest
        rows = slice(begin, end)
        scores = weights(q[rows], k[rows], causal, scale, window_size_left)
        values = v[rows].repeat_interleave(q.shape[1] // v.shape[1], 1)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hlm,mhd->lhd", scores.softmax(-1), values)
    assert end == len(q)
    return out, lse, None, None, None


def plain_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends: Any, _: Any, longest: int, __: int,
                   dropout: float, causal: bool, seed: Any, offset: Any, *, scale: float,
                   window_size_left: Any = None, window_size_right: Any = None) -> Any:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for begin, end in pairwise(ends.tolist()):
        rows = slice(begin, end)
        keys, values = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        p = (weights(q[rows], k[rows], causal, scale, window_size_left) - lse[:, rows, None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).T
        ds = scale * p * (torch.einsum("lhd,mhd->hlm", grad[rows], values) - delta[..., None])
        dq[rows] = torch.einsum("hlm,mhd->lhd", ds, keys)
        dk[rows] = torch.einsum("hlm,lhd->mhd", ds, q[rows]).unflatten(1, (-1, group)).sum(2)
        dv[rows] = torch.einsum("hlm,lhd->mhd", p, grad[rows]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = SimpleNamespace(_flash_attention_forward=plain_forward, _flash_attention_backward=plain_backward)
    monkeypatch.setattr(flash, "aten", aten)
    monkeypatch.setattr(fused, "unsupported", lambda q: None)
    monkeypatch.setattr(levels, "LONG_DOCUMENT", 10**6)
    monkeypatch.setattr(VarlenFlash, "most_sequences", 7)
    monkeypatch.setattr(packed, "CHUNK", 40)


def _gathered(case: Case) -> bool:
    q, *_ = case.tensors()[0]
    documents = None if case.documents is None else torch.tensor(case.documents)
    return levels._many_documents(q, case.pattern, documents) is not None


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(case=cases(max_seq_len=90).filter(_gathered))
def test_levels_equal_the_reference(plain_kernel: None, case: Case) -> None:
    tensors = case.tensors()
    truth = evaluate(case, *tensors, backend="reference")
    error, where = worst_error(evaluate(case, *tensors, backend="sdpa"), truth)
    assert error < 1e-12, f"{where} of {case}: {error}"


def test_the_rows_of_a_step_are_found_once(plain_kernel: None) -> None:
    case = Case(DilationPattern((8, 16, 32), (1, 2, 4)), 1, 60, 4, 2, 8, True, (0, 7, 40, 60), seed=0)
    packed.find_rows.cache_clear()
    for _ in range(3):
        evaluate(case, *case.tensors(), backend="sdpa")
    assert packed.find_rows.cache_info().misses == 1


def test_documents_are_taken_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK", 10)
    found = list(packed.stretches([0, 4, 10, 11, 30, 31, 31, 35]))
    assert found == [
        (slice(0, 10), (0, 4, 10)),
        (slice(10, 11), (0, 1)),
        (slice(11, 30), (0, 19)),
        (slice(30, 35), (0, 1, 1, 5)),
    ]


def test_what_is_gathered_and_what_is_left_to_the_kernels_for_views() -> None:
    def gathered(batch: int, seq_len: int, *documents: int, **options: Any) -> list[int] | None:
        pattern = DilationPattern((4, 32), (1, 4), **options)
        q = torch.empty(batch, seq_len, 4, 8, device="meta")
        return levels._many_documents(q, pattern, torch.tensor(documents) if documents else None)

    long = levels.LONG_DOCUMENT
    assert gathered(1, 200, 0, 100, 200) == [0, 100, 200]
    assert gathered(1, 2 * long, 0, long, 2 * long) is None
    # The rows of a batch: one long row where no segment crosses from one into the next.
    assert gathered(3, 16) is None
    assert gathered(3, 16, heads="grouped") is None
    assert gathered(3, 16, shift=2) == [0, 16, 32, 48]
    assert gathered(3, 33) == [0, 33, 66, 99]
    assert gathered(1, 33) is None
    assert gathered(2, long + 1) is None


@pytest.mark.parametrize("documents", [None, (0, 5, 6, 33, 50)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_windows_equal_their_definition(plain_kernel: None, documents: tuple[int, ...] | None, size: int) -> None:
    q, k, v = (
        torch.randn(1 if documents else 3, 50, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    borders = None if documents is None else torch.tensor(documents)
    block = build_block({"name": "sliding_window", "window": size})
    _same((q, k, v), window.window_attention(q, k, v, size, borders), block(q, k, v, borders), 1e-12)
    assert torch.library.opcheck(window.window_forward, (q, k, v, size, borders))


def _same(inputs: tuple[Tensor, ...], found: Tensor, truth: Tensor, limit: float) -> None:
    grad = torch.randn_like(truth)
    found_all = (found, *torch.autograd.grad(found, inputs, grad.to(found.dtype)))
    truth_all = (truth, *torch.autograd.grad(truth, inputs, grad))
    for ours, theirs in zip(found_all, truth_all, strict=True):
        assert (ours.double() - theirs.double()).norm() <= limit * max(theirs.double().norm(), 1.0)


def test_sequences_come_in_parts() -> None:
    whole = Sequences.of([3, 1, 4, 1, 5], torch.device("cpu"))
    parts = list(whole.parts(2))
    assert [rows for rows, _ in parts] == [slice(0, 4), slice(4, 9), slice(9, 14)]
    assert [part.on_device.tolist() for _, part in parts] == [[0, 3, 4], [0, 4, 5], [0, 5]]
    assert list(whole.parts(5)) == [(slice(None), whole)]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_many_documents_on_a_gpu(compiled: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VarlenFlash, "most_sequences", 50)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 300, (20,), generator=generator)
    documents = (0, *sizes.cumsum(0).tolist())
    pattern = DilationPattern((64, 128, 256), (1, 2, 4), shift=3)
    case = Case(pattern, 1, documents[-1], 4, num_kv_heads, 64, True, documents, seed=1)
    qkv, grad, _ = case.tensors("cuda", torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = evaluate(case, exact, grad.double(), None, backend="reference")
    borders = torch.tensor(documents)

    def attend(*tensors: Tensor) -> Tensor:
        return dilated_attention(*tensors, pattern, cu_seqlens=borders)

    out = (torch.compile(attend) if compiled else attend)(*qkv)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, qkv, grad)), strict=True))
    error, where = worst_error({n: x.double() for n, x in found.items()}, {n: truth[n] for n in found})
    assert error < 1.5e-2, f"{where}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, (0, 5, 6, 333, 500)])
@pytest.mark.parametrize("compiled", [False, True])
def test_windows_on_a_gpu(documents: tuple[int, ...] | None, compiled: bool) -> None:
    q, k, v = (
        torch.randn(1 if documents else 3, 500, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (4, 2, 2)
    )
    borders = None if documents is None else torch.tensor(documents)
    block = build_block({"name": "sliding_window", "window": 100})
    found = (torch.compile(block) if compiled else block)(q, k, v, borders)
    exact = tuple(x.detach().cpu().double().requires_grad_() for x in (q, k, v))
    truth = block(*exact, borders)
    grad = torch.randn_like(truth)
    found_all = (found, *torch.autograd.grad(found, (q, k, v), grad.to(found)))
    for ours, theirs in zip(found_all, (truth, *torch.autograd.grad(truth, exact, grad)), strict=True):
        assert (ours.cpu().double() - theirs).norm() <= 1.5e-2 * theirs.norm()


@pytest.mark.gpu
def test_masks_need_no_square_memory_where_nothing_is_to_be_compiled() -> None:
    block = build_block({"name": "block_sparse"})
    q = torch.randn(1, 32768, 2, 64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        block(q, q, q)
    assert torch.cuda.max_memory_allocated() - before < 2**30
