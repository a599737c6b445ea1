"""What dilated attention must be, known without computing it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from longnet.attention import BACKENDS, DilationPattern, dilated_attention

from .cases import Case, cases


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [DilationPattern((w,), (1,)) for w in (50, 90, 2**40)])
def test_one_level_that_holds_everything_is_dense(backend: str, causal: bool, pattern: DilationPattern) -> None:
    q, k, v = (torch.randn(2, 50, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)
    found = dilated_attention(q, k, v, pattern, causal=causal, backend=backend)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases())
def test_ones_give_ones_and_uncovered_rows_zero(backend: str, case: Case) -> None:
    (q, k, v), grad, _ = case.tensors()
    borders = case.documents or (0, case.seq_len)
    cu_seqlens = None if case.documents is None else torch.tensor(case.documents)
    ones = torch.ones_like(v)
    out, lse = dilated_attention(
        q, k, ones, case.pattern, causal=case.causal, cu_seqlens=cu_seqlens, backend=backend, return_lse=True
    )
    covered = torch.zeros(case.seq_len, case.num_heads, dtype=torch.bool)
    for begin, end in itertools.pairwise(borders):
        for head in range(case.num_heads):
            for level in range(len(case.pattern.levels)):
                covered[begin + case.pattern.rows(level, head, end - begin, case.num_heads), head] = True
    expected = covered.double()[None, :, :, None].expand_as(out)
    torch.testing.assert_close(out, expected)
    assert torch.equal(torch.isneginf(lse), ~covered.expand_as(lse))
    (dq,) = torch.autograd.grad(out, q, grad)
    assert dq.abs().max() < 1e-10  # a constant output: no score matters


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases())
def test_uncovered_rows_have_no_gradient(backend: str, case: Case) -> None:
    (q, k, v), grad, _ = case.tensors()
    cu_seqlens = None if case.documents is None else torch.tensor(case.documents)
    out, lse = dilated_attention(q, k, v, case.pattern, cu_seqlens=cu_seqlens, backend=backend, return_lse=True)
    unseen = torch.isneginf(lse)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    assert not out[unseen].any()
    assert not dq[unseen].any()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases())
def test_the_future_changes_nothing(backend: str, case: Case) -> None:
    (q, k, v), _, _ = case.tensors()
    at = case.seed % case.seq_len
    before = dilated_attention(q, k, v, case.pattern, causal=True, backend=backend)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, at:] += 1.0
    after = dilated_attention(q, k, v, case.pattern, causal=True, backend=backend)
    assert torch.equal(before[:, :at], after[:, :at])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases())
def test_a_packed_document_equals_itself_alone(backend: str, case: Case) -> None:
    if case.documents is None:
        return
    (q, k, v), _, _ = case.tensors()
    options = {"causal": case.causal, "backend": backend}
    packed = dilated_attention(q, k, v, case.pattern, cu_seqlens=torch.tensor(case.documents), **options)
    for begin, end in zip(case.documents, case.documents[1:], strict=False):
        alone = dilated_attention(*(x[:, begin:end] for x in (q, k, v)), case.pattern, **options)
        torch.testing.assert_close(packed[:, begin:end], alone, rtol=0, atol=1e-14)


def test_a_key_that_two_levels_see_counts_twice() -> None:
    """Two levels over the same two keys, one of them seen by both: softmax weights 2 : 1."""
    q = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([0.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
    pattern = DilationPattern((2, 2), (1, 2))  # the second level shows only position 0, to position 0
    for backend in BACKENDS:
        out = dilated_attention(q, q, v, pattern, causal=False, backend=backend)
        # Position 0 sees {0, 1} and {0}: mean of 0, 3, 0. Position 1 sees {0, 1}.
        torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 1.5], dtype=torch.float64))
