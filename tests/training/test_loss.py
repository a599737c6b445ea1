from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longnet.training.loss import LossSums, linear_cross_entropy

# How far two sums in a dtype may be apart, relative to their norm.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> LossSums:
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    valid = labels != -100
    nll = F.cross_entropy(logits, labels, reduction="sum")
    return LossSums(nll + z_loss * (logits.logsumexp(-1).square() * valid).sum(), nll, valid.sum())


def inputs(
    tokens: int = 50, width: int = 16, vocabulary: int = 37, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(device, dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def some_ignored(labels: Tensor) -> Tensor:
    """The first chunk whole, and single ones after it."""
    ignored = torch.arange(len(labels)) % 5 == 0
    ignored[:8] = True
    return labels.masked_fill(ignored.to(labels.device), -100)


def values_and_gradients(
    loss: Callable[..., LossSums], hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any
) -> tuple[LossSums, Tensor, Tensor]:
    sums = loss(hidden, weight, labels, **options)
    # Not 1, so that a backward pass that forgets its factor shows.
    grads = torch.autograd.grad(sums.loss * 0.3, (hidden, weight))
    return sums, *grads


def distance(result: Tensor, expected: Tensor) -> float:
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_rows", [None, 1, 7, 1000])
def test_equals_the_plain_computation(dtype: torch.dtype, z_loss: float, chunk_rows: int | None) -> None:
    hidden, weight, labels = inputs(dtype=dtype)
    labels = some_ignored(labels)
    options = {"z_loss": z_loss, "chunk_rows": chunk_rows}
    sums, *grads = values_and_gradients(linear_cross_entropy, hidden, weight, labels, **options)
    expected, *expected_grads = values_and_gradients(plain_loss, hidden, weight, labels, z_loss=z_loss)
    assert sums.loss.dtype == sums.nll.dtype == torch.promote_types(dtype, torch.float32)
    assert int(sums.tokens) == int(expected.tokens) == 34
    assert distance(sums.loss, expected.loss) < TOLERANCE[dtype]
    assert distance(sums.nll, expected.nll) < TOLERANCE[dtype]
    for grad, expected_grad, tensor in zip(grads, expected_grads, (hidden, weight), strict=True):
        assert grad.dtype == tensor.dtype
        assert distance(grad, expected_grad) < TOLERANCE[dtype]


def test_the_weights_gradient_adds_up_in_float32() -> None:
    """Many chunks of bfloat16: rounding after each would cost digits."""
    hidden, weight, labels = inputs(tokens=2000, vocabulary=5, dtype=torch.bfloat16)
    _, _, grad = values_and_gradients(linear_cross_entropy, hidden, weight, labels, chunk_rows=4)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    _, _, expected = values_and_gradients(plain_loss, *exact, labels)
    assert distance(grad, expected) < 4e-3


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Of the memory behind a view, not of the view.
        sizes = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tensors]
        self.elements = max([self.elements, *sizes])
        self.ops.add(func.name())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(512, 1000), (16, 4000), (4096, 100)])
def test_all_logits_never_exist(dtype: torch.dtype, tokens: int, vocabulary: int) -> None:
    hidden, weight, labels = inputs(tokens, 8, vocabulary, dtype)
    with LargestTensor() as plain:
        values_and_gradients(plain_loss, hidden, weight, labels)
    assert plain.elements >= tokens * vocabulary
    with LargestTensor() as ours:
        values_and_gradients(linear_cross_entropy, hidden, weight, labels, z_loss=0.1)
    assert ours.elements <= max(tokens * vocabulary // 8, weight.numel(), hidden.numel())
    with LargestTensor() as smaller:
        values_and_gradients(linear_cross_entropy, hidden, weight, labels, z_loss=0.1, chunk_rows=tokens // 16)
    assert smaller.elements <= max(tokens * vocabulary // 16, weight.numel(), hidden.numel())


def test_chunks_stay_small_however_many_tokens_there_are() -> None:
    from longnet.training.loss import _rows_per_chunk

    for fused in (False, True):
        assert _rows_per_chunk(2**24, 128256, fused) * 128256 <= 2**26 * (4 if fused else 1)
        assert _rows_per_chunk(2**24, 2**30, fused) == 1
        assert _rows_per_chunk(1, 384, fused) == 1


def test_nothing_to_predict_costs_nothing() -> None:
    hidden, weight, labels = inputs()
    sums, *grads = values_and_gradients(linear_cross_entropy, hidden, weight, torch.full_like(labels, -100), z_loss=0.1)
    assert [x.item() for x in sums] == [0.0, 0.0, 0.0]
    assert all((grad == 0).all() for grad in grads)
    empty = linear_cross_entropy(hidden[:0], weight, labels[:0])
    assert [x.item() for x in empty] == [0.0, 0.0, 0.0]


def test_another_label_may_be_ignored() -> None:
    hidden, weight, labels = inputs()
    sums = linear_cross_entropy(hidden, weight, labels, ignore_index=3)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=3, reduction="sum")
    torch.testing.assert_close(sums.loss, expected)
    assert int(sums.tokens) == int((labels != 3).sum()) < len(labels)


@pytest.mark.parametrize("label", [-1, 37])
def test_a_label_that_is_no_token_is_refused(label: int) -> None:
    hidden, weight, labels = inputs()
    labels[7] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)


def test_a_tied_weight_gets_both_gradients() -> None:
    embedding = nn.Embedding(37, 16, dtype=torch.float64)
    ids, labels = torch.randint(37, (2, 50), generator=torch.Generator().manual_seed(0))

    def grads(loss: Callable[..., LossSums]) -> Tensor:
        embedding.zero_grad()
        # Two micro-batches, as in accumulation.
        for part in (slice(0, 20), slice(20, 50)):
            loss(embedding(ids[part]).tanh(), embedding.weight, labels[part]).loss.backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad.clone()

    torch.testing.assert_close(grads(linear_cross_entropy), grads(plain_loss))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: str) -> None:
    hidden, weight, labels = inputs()
    learning = weight if frozen == "hidden" else hidden
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).loss, learning)
    (expected,) = torch.autograd.grad(plain_loss(hidden, weight, labels).loss, learning)
    torch.testing.assert_close(grad, expected)


def test_evaluation_computes_no_gradients() -> None:
    hidden, weight, labels = inputs()
    with LargestTensor() as training:
        linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad(), LargestTensor() as evaluation:
        sums = linear_cross_entropy(hidden, weight, labels)
    assert not sums.loss.requires_grad
    torch.testing.assert_close(sums.loss, plain_loss(hidden, weight, labels).loss)
    assert "aten::addmm_" in training.ops - evaluation.ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_as_the_head_would_be(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        sums, *grads = values_and_gradients(linear_cross_entropy, hidden, weight, labels)
        expected, *expected_grads = values_and_gradients(plain_loss, hidden, weight, labels)
    assert sums.loss.dtype == torch.float32
    assert distance(sums.loss, expected.loss) < TOLERANCE[dtype]
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.float32
        assert distance(grad, expected_grad) < TOLERANCE[dtype]


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["chunked", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_on_a_gpu(backend: str, dtype: torch.dtype, z_loss: float) -> None:
    hidden, weight, labels = inputs(tokens=1024, width=64, vocabulary=1000, dtype=dtype, device="cuda")
    labels = some_ignored(labels)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    options = {"z_loss": z_loss, "backend": backend}
    sums, *grads = values_and_gradients(linear_cross_entropy, hidden, weight, labels, **options)
    expected, *expected_grads = values_and_gradients(plain_loss, *exact, labels, z_loss=z_loss)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    # The z-loss's factor is rounded with the gradient of the logits: 1.04e-2 was measured in bfloat16.
    tolerance *= 1.5 if z_loss else 1.0
    assert distance(sums.loss, expected.loss) < tolerance
    assert distance(sums.nll, expected.nll) < tolerance
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert distance(grad, expected_grad) < tolerance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 5, 16)}, r"hidden has shape \(2, 5, 16\).*try hidden.flatten"),
        ({"labels": torch.zeros(49, dtype=torch.int64)}, r"labels \(49,\): expected"),
        ({"labels": torch.zeros(50, dtype=torch.int32)}, r"labels has dtype torch.int32.*try labels.long"),
        ({"weight": torch.zeros(37, 15)}, r"weight has shape \(37, 15\): expected \(vocabulary, 16\)"),
        ({"chunk_rows": 0}, r"chunk_rows=0: expected at least 1"),
        ({"backend": "triton"}, r"backend='triton': expected one of \['auto', 'chunked', 'fused'\]"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})
