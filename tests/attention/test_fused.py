"""The one-pass fold of the levels, through Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

from longnet.attention import DilationPattern, fused

from .cases import Case, evaluate, worst_error

pytest.importorskip("triton")

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
    "packed documents": Case(DilationPattern((4, 8), (1, 2)), 1, 23, 2, 2, 8, True, (0, 1, 9, 23), seed=5),
    "segments longer than the row": Case(DilationPattern((8, 64), (1, 4)), 2, 16, 4, 2, 8, True, None, seed=6),
    "nothing is covered": Case(DilationPattern((16,), (16,)), 1, 3, 1, 1, 8, True, None, seed=7),
}


@pytest.fixture
def fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold for any tensor, in small chunks; the interpreter must be asked for before the kernels are read."""
    if not torch.cuda.is_available():
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "unsupported", lambda q: None)
    monkeypatch.setattr(fused, "CHUNK", 16)


@pytest.mark.usefixtures("fold")
@pytest.mark.parametrize("name", CASES)
def test_one_pass_equals_reference(name: str) -> None:
    case = CASES[name]
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    qkv, grad, grad_lse = case.tensors(device, dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = evaluate(case, exact, grad.double(), grad_lse.double(), backend="reference")
    error, where = worst_error(evaluate(case, qkv, grad, grad_lse, backend="sdpa"), truth)
    assert error < (2e-2 if gpu else 2e-6), f"{where}: {error}"


def test_says_why_it_does_not_serve() -> None:
    assert fused.unsupported(torch.zeros(1, 1, 1, 8)) == "needs a CUDA tensor, got cpu"
