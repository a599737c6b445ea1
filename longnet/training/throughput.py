"""How fast a run goes, and how fast it could go: model FLOPs against the matmul rate the device really reaches."""

from __future__ import annotations

import resource
import sys
import time

import torch
from torch import nn
from transformers import PreTrainedModel

from .pretrained import attention_flops


def training_flops_per_token(model: PreTrainedModel, context_length: int) -> float:
    """FLOPs that one token of a full row costs, forward and backward, counted from the modules.

    A matrix product costs 2 per weight forward and twice that backward; the embedding is a lookup and costs nothing,
    the head is a product even where it shares the embedding's weight. Attention counts the pairs that are seen.
    Recomputed activations are not counted, as is the custom for model FLOPs.
    """
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return 3 * (2 * products + attention_flops(model, context_length) / context_length)


def measure_matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """The FLOP/s of a large square matrix product on ``device``: the best of a short series."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    fastest = float("inf")
    deadline = time.perf_counter() + seconds
    for attempt in range(1000):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        synchronize(device)
        end = time.perf_counter()
        # The first product loads the library and warms the clocks.
        if attempt:
            fastest = min(fastest, end - start)
        if attempt and end > deadline:
            break
    return 2 * size**3 / fastest


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: what torch allocated on a GPU, what the process had resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Forgets the peak of earlier jobs in this process, where the device allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class TrainingClock:
    """Counts the seconds spent in training steps, waiting for data included; validation and saving pause it."""

    def __init__(self) -> None:
        self.total = 0.0
        self._lap = 0.0
        self._started: float | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """Pauses, after the device has done what the steps gave it."""
        if self._started is not None:
            synchronize(device)
            elapsed = time.perf_counter() - self._started
            self.total += elapsed
            self._lap += elapsed
            self._started = None

    def lap(self, device: torch.device) -> float:
        """Seconds counted since the last lap."""
        running = self._started is not None
        self.stop(device)
        seconds, self._lap = self._lap, 0.0
        if running:
            self.start()
        return seconds
