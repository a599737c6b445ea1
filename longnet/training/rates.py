"""How fast this machine is at the three things that a training step is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from longnet.attention import DilationPattern, dilated_attention
from longnet.planning import Rates
from longnet.planning.time import ATTENTION_BACKWARD

from .throughput import measure_matmul_rate, synchronize

HEADS, HEAD_DIM = 8, 64


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Matrix products, dilated attention forward and backward, and reading and writing memory: a second or so."""
    on_gpu = device.type == "cuda"
    length = 32768 if on_gpu else 2048
    pattern = DilationPattern.geometric(length, base=length // 8)
    shape = (1, length, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        out = dilated_attention(q, k, v, pattern)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()

    # Larger than any cache.
    left = torch.randn(2**28 if on_gpu else 2**25, device=device)
    right = torch.empty_like(left)
    pairs = (1 + ATTENTION_BACKWARD) * pattern.flops(length, HEADS, HEAD_DIM)
    return Rates(
        name=torch.cuda.get_device_name(device) if on_gpu else f"this {device.type}",
        matmul=measure_matmul_rate(device, dtype),
        attention=pairs / _fastest(attend, device),
        bandwidth=2 * left.numel() * left.element_size() / _fastest(lambda: right.copy_(left), device),
    )


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
