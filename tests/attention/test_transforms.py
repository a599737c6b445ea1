"""The operator inside torch.compile, under activation checkpointing, and with dropout."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from longnet.attention import DilationPattern, dilated_attention
from longnet.attention.levels import dilated_backward, dilated_forward

PATTERN = DilationPattern((8, 16, 40), (1, 2, 5))


def draw(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(backend: str, packed: bool) -> None:
    device = "cuda" if backend == "inductor" else "cpu"
    q, k, v = draw(1, 50, 4, 8, device=device), draw(1, 50, 2, 8, device=device), draw(1, 50, 2, 8, device=device)
    cu_seqlens = torch.tensor([0, 13, 50]) if packed else None

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dilated_attention(q * 2, k, v, PATTERN, cu_seqlens=cu_seqlens)
        assert isinstance(out, torch.Tensor)
        return (out * out).sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected, found = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (step, compiled))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_ops_are_registered_soundly() -> None:
    """Schema, fake kernels and autograd registration agree with what the ops do."""
    q, k, v = draw(2, 20, 4, 4), draw(2, 20, 2, 4), draw(2, 20, 2, 4)
    options = (PATTERN.segment_lengths, PATTERN.dilation_rates, "all", 0, True, 0.5, None, 0.0, None)
    opcheck(dilated_forward, (q, k, v, *options))
    with torch.no_grad():
        out, lse = dilated_forward(q, k, v, *options)
    inputs = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse)
    opcheck(dilated_backward, (*inputs, *options), test_utils=("test_schema", "test_faketensor"))


def gradients(q: torch.Tensor, use_checkpoint: bool, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)

    def block(x: torch.Tensor) -> torch.Tensor:
        out = dilated_attention(x, x, x, PATTERN, dropout_p=dropout_p)
        assert isinstance(out, torch.Tensor)
        return out.sin()

    out = checkpoint(block, q, use_reentrant=False) if use_checkpoint else block(q)
    assert isinstance(out, torch.Tensor)
    (grad,) = torch.autograd.grad(out.sum(), q)
    return out, grad


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpointing_changes_no_bit(dropout_p: float) -> None:
    q = draw(2, 50, 4, 8)
    for plain, again in zip(gradients(q, False, dropout_p), gradients(q, True, dropout_p), strict=True):
        assert torch.equal(plain, again)


def test_dropout_gradient_is_that_of_the_same_mask() -> None:
    """With the seed held, the dropped operator is a smooth function, and its numeric gradient is its gradient."""
    q, k, v = draw(1, 7, 4, 2), draw(1, 7, 2, 2), draw(1, 7, 2, 2)

    def operator(*qkv: torch.Tensor) -> object:
        torch.manual_seed(0)
        return dilated_attention(*qkv, DilationPattern((4, 6), (1, 3)), dropout_p=0.4)

    assert torch.autograd.gradcheck(operator, (q, k, v))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_dropout_is_unbiased_and_drops(backend: str) -> None:
    q, k, v = (torch.randn(1, 12, 2, 4, dtype=torch.float64) for _ in range(3))
    pattern = DilationPattern((6, 12), (1, 2))
    exact = dilated_attention(q, k, v, pattern)
    draws = torch.stack(
        [dilated_attention(q, k, v, pattern, dropout_p=0.25, backend=backend) for _ in range(800)]  # type: ignore[misc]
    )
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - exact).abs() / (draws.std(0) / len(draws) ** 0.5 + 1e-12)
    assert error.max() < 5.5  # standard errors, over 96 numbers


def test_dropout_follows_torch_seed() -> None:
    q = torch.randn(1, 40, 4, 8)
    torch.manual_seed(1)
    first = dilated_attention(q, q, q, PATTERN, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, dilated_attention(q, q, q, PATTERN, dropout_p=0.5))  # type: ignore[arg-type]


def test_large_dropout_blocks_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    from longnet.attention import flash

    q, k, v = draw(1, 40, 4, 8), draw(1, 40, 2, 8), draw(1, 40, 2, 8)
    kernel = flash.Math()
    whole = kernel.forward(q, k, v, True, 0.3)
    grads = kernel.backward(q, q, k, v, *whole, True, 0.3)
    monkeypatch.setattr(flash.Math, "chunk_elements", 4 * 40 * 7)
    chunked = kernel.forward(q, k, v, True, 0.3)
    for ours, theirs in zip((*chunked, *kernel.backward(q, q, k, v, *whole, True, 0.3)), (*whole, *grads), strict=True):
        torch.testing.assert_close(ours, theirs)
