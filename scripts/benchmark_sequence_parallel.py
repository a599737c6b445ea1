"""Time and memory of one rank of many, at its real shapes, on one device and without communication.

    python scripts/benchmark_sequence_parallel.py --context 1048576 --ranks 1 2 4 8
    python scripts/benchmark_sequence_parallel.py --context 1048576 --form ring --layers 12 --checkpointing full

Without --layers it measures one attention, forward and backward; with it, a decoder of so many layers. The rank that is
measured is the last one of a sequence, which has the most to attend. "received" is what it would get from the others
for one attention, by the formulas of longnet.parallel.communication, and "at link" the time that takes at --link GB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longnet.attention import DilationPattern
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.parallel import FORMS, attention_traffic
from longnet.parallel.attention import ShardedOperator
from longnet.parallel.mesh import MeshShape
from longnet.parallel.rows import Layout
from longnet.parallel.sharding import shard_length
from longnet.parallel.share import SequenceShare, attend_over
from longnet.parallel.solo import SoloGroup
from longnet.training import activation_checkpointing
from longnet.training.throughput import synchronize


def attention_pass(options: argparse.Namespace, pattern: DilationPattern, ranks: int) -> Callable[[], object]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    length = shard_length(ranks, options.context)
    operator = ShardedOperator(options.form, SoloGroup(ranks - 1, ranks))
    q, k, v, grad = (
        torch.randn(1, length, heads, options.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads)
    )

    def run() -> object:
        out = operator(q, k, v, pattern, seq_len=options.context)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def decoder_pass(options: argparse.Namespace, pattern: DilationPattern, ranks: int) -> Callable[[], object]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    length = shard_length(ranks, options.context)
    hidden = options.heads * options.head_dim
    config = LongNetConfig(
        hidden_size=hidden,
        intermediate_size=options.intermediate or hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.context,
        attention=[{"name": "dilated", **pattern.to_config()}],
    )
    with device:
        model = LongNetForCausalLM(config)
    model.model.residual_dtype = dtype
    activation_checkpointing.apply(model, options.checkpointing, tile=options.tile)
    attend_over(model, options.form, SoloGroup(ranks - 1, ranks))
    ids = torch.randint(config.vocab_size, (1, length), device=device)
    positions = SequenceShare(MeshShape(1, ranks), ranks - 1).positions(length, device)

    def run() -> object:
        model.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out: Tensor = model.hidden_states(ids, positions)
        out.backward(torch.ones_like(out))
        return out

    return run


def measure(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Milliseconds (median) and the peak in GiB (only a GPU tells)."""
    work()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return median(times), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2**17, help="positions of the whole sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks that share it")
    parser.add_argument("--form", choices=FORMS, default="gather")
    parser.add_argument("--base", type=int, default=2048, help="first segment length of the geometric pattern")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="decoder layers; 0 for one attention alone")
    parser.add_argument(
        "--intermediate", type=int, default=None, help="width of the MLP; by default 8/3 of the model's"
    )
    parser.add_argument("--checkpointing", choices=activation_checkpointing.KINDS, default="none")
    parser.add_argument("--tile", type=int, default=None, help="positions that a layer works on at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s into a rank, for the column at link")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads

    pattern = DilationPattern.geometric(options.context, options.base)
    element_size = getattr(torch, options.dtype).itemsize
    table = Table(box=box.SIMPLE, title=f"{options.form}, N = {options.context:,}, {options.device} {options.dtype}")
    for name in ("ranks", "positions", "fwd + bwd ms", "peak GiB", "received MiB", "at link ms"):
        table.add_column(name, justify="right")
    for ranks in options.ranks:
        build = decoder_pass if options.layers else attention_pass
        milliseconds, peak = measure(build(options, pattern, ranks), torch.device(options.device), options.repeats)
        layout = Layout(pattern, ranks - 1, ranks, options.context, options.heads, options.kv_heads)
        levels = attention_traffic(options.form, layout, options.head_dim, element_size=element_size)
        received = sum(level.forward.received + level.backward.received for level in levels)
        table.add_row(
            str(ranks), f"{shard_length(ranks, options.context):,}", f"{milliseconds:.1f}", f"{peak:.2f}",
            f"{received / 2**20:.1f}", f"{received / options.link / 1e6:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
