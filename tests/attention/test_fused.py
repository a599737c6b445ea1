"""The one-pass fold of the levels, through Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from longnet.attention import DilationPattern, dilated_attention, fused, levels
from longnet.parallel.ulysses import HeadShard

from .cases import Case, evaluate, worst_error

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

CASES = {
    "levels nest, in chunks, a batch as one row": Case(
        DilationPattern((4, 8, 16), (1, 2, 4)), 2, 48, 4, 4, 8, True, None, seed=0
    ),
    "shared KV heads on slices and diagonals": Case(
        DilationPattern((4, 16), (1, 8)), 1, 32, 6, 2, 8, True, None, seed=1
    ),
    "r divides neither w nor H": Case(DilationPattern((7, 11), (3, 5)), 1, 31, 4, 4, 8, False, None, seed=2),
    "shifted borders": Case(DilationPattern((6, 9), (1, 3), shift=4), 2, 29, 3, 1, 8, True, None, seed=3),
    "grouped heads": Case(DilationPattern((4, 8), (1, 3), heads="grouped"), 1, 20, 5, 5, 8, True, None, seed=4),
    "grouped heads, a batch as one row": Case(
        DilationPattern((4, 64), (1, 2), heads="grouped"), 2, 16, 4, 2, 8, True, None, seed=13
    ),
    "grouped heads, and a shorter pattern would be sorted otherwise": Case(
        DilationPattern((32, 64), (4, 1), heads="grouped"), 2, 16, 4, 4, 8, True, None, seed=14
    ),
    "a shift within segments longer than the row": Case(
        DilationPattern((8, 64), (1, 4), shift=4), 2, 16, 4, 4, 8, True, None, seed=15
    ),
    "a shift as long as the row": Case(DilationPattern((4,), (1,), shift=3), 1, 3, 2, 2, 8, True, None, seed=16),
    "packed documents": Case(DilationPattern((4, 8), (1, 2)), 1, 23, 2, 2, 8, True, (0, 1, 9, 23), seed=5),
    "segments longer than the row": Case(DilationPattern((8, 64), (1, 4)), 2, 16, 4, 2, 8, True, None, seed=6),
    "blocks lie in one segment each": Case(
        DilationPattern((16, 32, 64), (1, 2, 4)), 1, 64, 4, 4, 8, True, None, seed=8
    ),
    "blocks lie in one segment each, shared KV heads": Case(
        DilationPattern((16, 32, 48), (1, 2, 6)), 1, 96, 4, 2, 8, True, None, seed=9
    ),
    "onto the first level, r does not divide w": Case(
        DilationPattern((4, 10), (1, 4)), 1, 20, 4, 4, 8, True, None, seed=12
    ),
    "the first level alone": Case(DilationPattern.dense(), 2, 9, 4, 2, 8, True, None, seed=10),
    "the first level alone holds every row": Case(
        DilationPattern((8, 12), (1, 3)), 2, 24, 4, 2, 8, False, None, seed=11
    ),
    "nothing is covered": Case(DilationPattern((16,), (16,)), 1, 3, 1, 1, 8, True, None, seed=7),
}


@pytest.mark.skipif(GPU or INTERPRETED or find_spec("triton") is None, reason="the cases below run by themselves")
def test_cases_through_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so this takes a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert f"{len(CASES) + 3} passed" in done.stdout, done.stdout


@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or Triton's interpreter: see the test above")
@pytest.mark.parametrize("name", CASES)
def test_one_pass_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "unsupported", lambda q: None)
    monkeypatch.setattr(fused, "CHUNK", 16)
    monkeypatch.setattr(levels, "LONG_DOCUMENT", 0)
    if name.startswith("blocks lie"):
        combine = pytest.importorskip("longnet.attention.kernels.combine")
        monkeypatch.setattr(combine, "BLOCK", 64)
    case = CASES[name]
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    qkv, grad, grad_lse = case.tensors(device, dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = evaluate(case, exact, grad.double(), grad_lse.double(), backend="reference")
    error, where = worst_error(evaluate(case, qkv, grad, grad_lse, backend="sdpa"), truth)
    assert error < (2e-2 if GPU else 2e-6), f"{where}: {error}"


@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or Triton's interpreter: see the test above")
def test_strides_are_those_that_a_compiler_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "unsupported", lambda q: None)
    case = CASES["the first level alone"]
    qkv, grad, _ = case.tensors(*(("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)))
    out, lse = dilated_attention(*qkv, case.pattern, backend="sdpa", return_lse=True)
    assert all(x.is_contiguous() for x in (out, lse, *torch.autograd.grad(out, qkv, grad)))


@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or Triton's interpreter: see the test above")
def test_one_pass_over_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "unsupported", lambda q: None)
    combine = pytest.importorskip("longnet.attention.kernels.combine")
    monkeypatch.setattr(combine, "BLOCK", 64)
    pattern, total = DilationPattern((16, 32, 64), (1, 2, 4)), 5
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 64, total, 8, device=device, dtype=dtype) for _ in range(4))
    out, lse = levels.forward(q, k, v, pattern, True, 1.0)
    truth = out, *levels.backward(grad, q, k, v, out, lse, pattern, True, 1.0)
    some = range(1, 4)
    heads = HeadShard.of(pattern, some, total)
    q, k, v, grad = (x[:, :, some.start : some.stop] for x in (q, k, v, grad))
    out, lse = levels.forward(q, k, v, heads, True, 1.0)
    found = out, *levels.backward(grad, q, k, v, out, lse, heads, True, 1.0)
    for there, here in zip(truth, found, strict=True):
        torch.testing.assert_close(here, there[:, :, some.start : some.stop])


def test_says_why_it_does_not_serve() -> None:
    assert fused.unsupported(torch.zeros(1, 1, 1, 8)) == "needs a CUDA tensor, got cpu"
