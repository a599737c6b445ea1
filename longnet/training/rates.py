"""How fast this machine is at the three things that a training step is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers.activations import ACT2FN

from longnet.attention import DilationPattern, build_block, dilated_attention
from longnet.attention.blocks import Dilated
from longnet.planning import Rates, Workload
from longnet.planning.time import ATTENTION_BACKWARD, PASSES

from .throughput import measure_matmul_rate, synchronize

HEADS, HEAD_DIM, HIDDEN, INNER = 8, 64, 512, 2048
GPU_LENGTH, CPU_LENGTH = 32768, 2048


def measure_rates(device: torch.device, dtype: torch.dtype, workload: Workload | None = None) -> Rates:
    """Matrix products, dilated attention forward and backward, and reading and writing memory: a second or so.

    Args:
        device: to measure.
        dtype: of products and attention.
        workload: whose pattern and widths to measure with on a CPU, where calls are as fast as their shapes.
    """
    if device.type == "cuda":
        pattern = DilationPattern.geometric(GPU_LENGTH, base=GPU_LENGTH // 8)
        return Rates(
            name=torch.cuda.get_device_name(device),
            matmul=measure_matmul_rate(device, dtype),
            attention=_attention(device, dtype, pattern, GPU_LENGTH, HEADS, HEAD_DIM),
            bandwidth=_copies(device, 2**28),
        )
    length, heads, head_dim, hidden, inner, activation = CPU_LENGTH, HEADS, HEAD_DIM, HIDDEN, INNER, "silu"
    pattern = DilationPattern.geometric(length, base=length // 8)
    if workload:
        model, length = workload.model, min(length, workload.context_length)
        heads, head_dim = model.num_attention_heads, model.head_dim
        hidden, inner, activation = model.hidden_size, model.intermediate_size, model.hidden_act
        block = build_block(model.block_spec(0))
        pattern = block.pattern if isinstance(block, Dilated) else DilationPattern.dense()
    return Rates(
        name=f"this {device.type}",
        matmul=_products(device, dtype, length, hidden, inner),
        attention=_attention(device, dtype, pattern, length, heads, head_dim),
        bandwidth=_small_operations(device, length, inner, activation),
        copies=_copies(device, 2**25),
    )


def _attention(
    device: torch.device, dtype: torch.dtype, pattern: DilationPattern, length: int, heads: int, head_dim: int
) -> float:
    shape = (1, length, heads, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        out = dilated_attention(q, k, v, pattern)
        assert isinstance(out, Tensor)
        out.sum().backward()

    return (1 + ATTENTION_BACKWARD) * pattern.flops(length, heads, head_dim) / _fastest(attend, device)


def _products(device: torch.device, dtype: torch.dtype, length: int, hidden: int, inner: int) -> float:
    """FLOP/s of a layer's widest product, forward and backward."""
    x = torch.randn(length, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(inner, hidden, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(length, inner, device=device, dtype=dtype)
    return 6 * length * hidden * inner / _fastest(lambda: linear(x, weight).backward(grad), device)


def _copies(device: torch.device, elements: int) -> float:
    # Larger than any cache.
    left = torch.randn(elements, device=device)
    right = torch.empty_like(left)
    return 2 * left.numel() * left.element_size() / _fastest(lambda: right.copy_(left), device)


def _small_operations(device: torch.device, length: int, width: int, activation: str) -> float:
    """Bytes a second of a norm and an activation, forward and backward: a CPU computes longer on them than it reads."""
    x = torch.randn(length, width, device=device, requires_grad=True)
    grad, act = torch.randn_like(x), ACT2FN[activation]
    # What the norm keeps, twice its input, what it gives, and the activation.
    made = 4 * x.numel() * x.element_size()
    return PASSES * made / _fastest(lambda: act(rms_norm(x, (width,))).backward(grad), device)


def _fastest(run: Callable[[], object], device: torch.device, attempts: int = 5) -> float:
    times = []
    for _ in range(attempts):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    # The first one loads and chooses kernels.
    return min(times[1:])
