"""Every backend against the reference in float64, on outputs and on gradients."""

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

from longnet.attention import BACKENDS, DilationPattern, dilated_attention, explain_backend

from .cases import Case, cases, evaluate, worst_error

FAST = [name for name in BACKENDS if name != "reference"]


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=150)
@given(case=cases())
def test_equals_reference_in_float64(backend: str, case: Case) -> None:
    tensors = case.tensors()
    truth = evaluate(case, *tensors, backend="reference")
    error, where = worst_error(evaluate(case, *tensors, backend=backend), truth)
    assert error < 1e-12, f"{where} of {case}: {error}"


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize("documents", [None, (0, 100, 101, 257, 331)], ids=["one", "packed"])
def test_dtypes_and_head_dims(
    backend: str,
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    documents: tuple[int, ...] | None,
    device: str,
) -> None:
    pattern = DilationPattern((64, 96, 200), (1, 3, 4))
    case = Case(pattern, 1 if documents else 2, 331, 6, num_kv_heads, head_dim, True, documents, seed=7)
    qkv, grad, _ = case.tensors(device, dtype)
    truth = evaluate(
        case, [x.detach().double().requires_grad_() for x in qkv], grad.double(), None, backend="reference"
    )
    error, where = worst_error(evaluate(case, qkv, grad, None, backend=backend), truth)
    assert error < TOLERANCE[dtype], f"{where}: {error}"


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 31, 33, 64, 65, 127])
@pytest.mark.parametrize("heads", ["all", "grouped"])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_around_borders(seq_len: int, heads: str, causal: bool, device: str) -> None:
    pattern = DilationPattern((16, 32, 64), (1, 2, 4), heads=heads, shift=5)
    case = Case(pattern, 2, seq_len, 8, 4, 8, causal, None, seed=seq_len)
    tensors = case.tensors(device)
    error, where = worst_error(evaluate(case, *tensors, backend="sdpa"), evaluate(case, *tensors, backend="reference"))
    assert error < 1e-12, f"{where}: {error}"


@pytest.mark.parametrize("seq_len", [63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 513])
def test_causal_segments_of_many_rows(seq_len: int, device: str) -> None:
    """Segments long enough to be cut into triangles and rectangles, whole ones and a last short one."""
    case = Case(DilationPattern((seq_len, 2 * seq_len - 3), (1, 2)), 2, 2 * seq_len + 5, 4, 2, 8, True, None, seed=0)
    tensors = case.tensors(device)
    error, where = worst_error(evaluate(case, *tensors, backend="sdpa"), evaluate(case, *tensors, backend="reference"))
    assert error < 1e-12, f"{where}: {error}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    case = Case(DilationPattern((4, 6), (1, 3)), 1, 7, 4, 2, 2, True, None, seed=0)
    qkv, _, _ = case.tensors()

    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dilated_attention(q, k, v, case.pattern, backend=backend, return_lse=True)

    assert gradcheck(operator, qkv)


def test_non_contiguous_and_expanded_inputs(device: str) -> None:
    case = Case(DilationPattern((8, 32), (1, 4)), 3, 45, 4, 4, 8, True, None, seed=1)
    (q, k, v), grad, _ = case.tensors(device)
    heads_first = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    expanded = k.detach()[:1].expand(3, -1, -1, -1).requires_grad_()
    strided = torch.stack((v.detach(), v.detach()), dim=-1).flatten(-2)[..., ::2].requires_grad_()
    inputs = [heads_first, expanded, strided]
    assert not any(x.is_contiguous() for x in inputs)
    plain = [x.detach().contiguous().requires_grad_() for x in inputs]
    not_contiguous_grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
    found = evaluate(case, inputs, not_contiguous_grad, None, backend="sdpa")
    error, where = worst_error(found, evaluate(case, plain, grad, None, backend="reference"))
    assert error < 1e-12, f"{where}: {error}"


def test_views_are_not_copied() -> None:
    """The kernels read q, k, v where they lie: forward allocates no tensor as large as its inputs but the result."""
    case = Case(DilationPattern((64, 128, 256), (1, 2, 4)), 1, 512, 8, 8, 16, True, None, seed=0)
    (q, k, v), _, _ = case.tensors(dtype=torch.float32)
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        dilated_attention(q, k, v, case.pattern)
    names = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert not names & {"aten::index_select", "aten::index", "aten::gather", "aten::contiguous", "aten::clone"}


def test_twice_in_a_row_is_the_same() -> None:
    case = Case(DilationPattern((8, 16), (1, 2)), 2, 40, 4, 2, 8, True, None, seed=3)
    tensors = case.tensors()
    first, second = (evaluate(case, *tensors, backend="sdpa") for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_lse_dtype_and_shape() -> None:
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        q = torch.randn(2, 10, 4, 8, dtype=dtype)
        for backend in BACKENDS:
            out, lse = dilated_attention(q, q, q, DilationPattern.dense(), backend=backend, return_lse=True)
            assert out.dtype == dtype
            assert lse.dtype == expected
            assert lse.shape == (2, 10, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    q, k, v = (torch.randn(1, 33, 4, 8, device=device, requires_grad=True) for _ in range(3))
    pattern = DilationPattern((8, 32), (1, 4))
    plain = dilated_attention(*(x.to(dtype) for x in (q, k, v)), pattern)
    with torch.autocast(device, dtype=dtype):
        cast = dilated_attention(q, k.to(dtype), v, pattern)
    assert cast.dtype == dtype
    assert torch.equal(cast, plain)
    cast.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_auto_says_what_it_picked_and_why() -> None:
    q = torch.randn(1, 8, 2, 4)
    assert explain_backend(q, q) == (
        "sdpa: levels through the cpu flash kernel, the fastest here for torch.float32 on cpu"
    )
    assert "chunked matrix products" in explain_backend(q, q, dropout_p=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "num_kv_heads", "head_dim", "kernel"), [
    (torch.bfloat16, 4, 64, "cudnn"), (torch.bfloat16, 2, 64, "cudnn"), (torch.bfloat16, 2, 256, "flash"),
    (torch.float32, 2, 64, "memory-efficient"), (torch.float64, 4, 64, "math"),
])  # fmt: skip
def test_auto_picks_the_fast_kernel_on_a_gpu(dtype: torch.dtype, num_kv_heads: int, head_dim: int, kernel: str) -> None:
    q = torch.randn(1, 8, 4, head_dim, device="cuda", dtype=dtype)
    assert f"the {kernel} kernel" in explain_backend(q, q[:, :, :num_kv_heads])
