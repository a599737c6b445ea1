"""Time and memory of dilated attention against dense attention, over sequence lengths.

    python scripts/benchmark_attention.py                                   # this machine's GPU, or its CPU
    python scripts/benchmark_attention.py --lengths 16384 --heads 8 --base 512 --levels 5 --device cpu

Medians of interleaved runs. "promised" is the speed-up over dense attention that the FLOPs promise, "kept" the part of
it that the time shows. The limit is the time that the FLOPs would take at the rate that the library's kernel reaches in
the same run on plain causal segments as long as the first level's. Writes a table (CSV) and a plot (PNG) into --output.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longnet.attention import BACKENDS, DilationPattern, dilated_attention
from longnet.attention.dilated import explain_backend
from longnet.parallel import RingDilatedAttention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Measurement:
    contender: str
    seq_len: int
    forward_ms: float
    forward_backward_ms: float
    peak_mib: float
    flops: int
    promised: float = float("nan")
    speedup: float = float("nan")
    forward_limits: float = float("nan")
    limits: float = float("nan")

    @property
    def kept(self) -> float:
        return self.speedup / self.promised


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def segments(length: int) -> Attend:
    """Plain causal attention in segments, the rate of which is the limit for everything built of its kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = q.shape[1] // length * length
        q, k, v = (x[0, :whole].unflatten(0, (-1, length)) for x in (q, k, v))
        return dense(q, k, v)

    return attend


def dilated(pattern: DilationPattern, backend: str, borders: list[int] | None = None) -> Attend:
    cu_seqlens = None if borders is None else torch.tensor(borders)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, pattern, backend=backend, cu_seqlens=cu_seqlens)
        assert isinstance(out, Tensor)
        return out

    return attend


def start_timing(work: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Runs the work and gives a function that tells its time in ms.

    On a GPU nothing waits: the host runs ahead, as it does in training, and the times are read when all is done.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        return lambda: begin.elapsed_time(end)
    start = time.perf_counter()
    work()
    elapsed = (time.perf_counter() - start) * 1e3
    return lambda: elapsed


def peak_mib(work: Callable[[], object], device: torch.device) -> float:
    """The memory that one run takes above what is there before it."""
    # What an earlier contender left behind must not be freed in between.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        return float("nan")

    def resident(field: str) -> float:
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(field))

    start = resident("VmRSS")
    reset.write_text("5")
    work()
    return max(0.0, resident("VmHWM") - start)


def measure(
    contenders: dict[str, tuple[Attend, int]], qkv: list[Tensor], grad: Tensor, repeats: int
) -> list[Measurement]:
    device = grad.device

    def forward(attend: Attend) -> Tensor:
        with torch.no_grad():
            return attend(*qkv)

    def forward_backward(attend: Attend) -> object:
        out = attend(*qkv)
        return torch.autograd.grad(out, qkv, grad.view(-1)[: out.numel()].view_as(out))

    times: dict[str, tuple[list[Callable[[], float]], ...]] = {name: ([], []) for name in contenders}
    peaks = {name: peak_mib(partial(forward_backward, attend), device) for name, (attend, _) in contenders.items()}
    for _ in range(repeats):
        for name, (attend, _) in contenders.items():
            times[name][0].append(start_timing(partial(forward, attend), device))
            times[name][1].append(start_timing(partial(forward_backward, attend), device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    medians = {name: [median(read() for read in series) for series in both] for name, both in times.items()}
    return [
        Measurement(name, qkv[0].shape[1], medians[name][0], medians[name][1], peaks[name], flops)
        for name, (_, flops) in contenders.items()
    ]


def run(options: argparse.Namespace, console: Console) -> list[Measurement]:
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    kv_heads = options.kv_heads or options.heads
    context = options.base * options.ratio ** (options.levels - 1)
    geometric = DilationPattern.geometric(context, options.base, options.ratio)
    pattern = DilationPattern.from_config(options.pattern) if options.pattern else geometric
    patterns = {heads: replace(pattern, heads=heads) for heads in ("all", "grouped")}
    first_segment = pattern.segment_lengths[0]
    console.print(f"{patterns['all']}; H={options.heads}, Hkv={kv_heads}, D={options.head_dim}, {dtype}, {device}")
    results: list[Measurement] = []
    left_out: set[str] = set(options.without)
    shape = options.heads, options.head_dim
    # No thread of the progress bar's own: on a few cores it would be timed along.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(options.lengths))
        for seq_len in sorted(options.lengths):
            progress.update(task, description=f"N = {seq_len}", refresh=True)
            torch.manual_seed(0)
            qkv = [
                torch.randn(1, seq_len, heads, options.head_dim, device=device, dtype=dtype, requires_grad=True)
                for heads in (options.heads, kv_heads, kv_heads)
            ]
            grad = torch.randn(1, seq_len, options.heads, options.head_dim, device=device, dtype=dtype)
            if seq_len == min(options.lengths):
                console.print(explain_backend(qkv[0], qkv[1]))
            contenders: dict[str, tuple[Attend, int]] = {
                "dense": (dense, DilationPattern.dense().flops(seq_len, *shape))
            }
            if seq_len >= first_segment:
                whole = DilationPattern((first_segment,), (1,)).flops(
                    seq_len // first_segment * first_segment, options.heads, options.head_dim
                )
                contenders["segments"] = (segments(first_segment), whole)
            for backend, declared in BACKENDS.items():
                if declared.unsupported(qkv[0], qkv[1]) is None:
                    flops = patterns["all"].flops(seq_len, *shape)
                    contenders[f"dilated {backend}"] = (dilated(patterns["all"], backend), flops)
            flops = patterns["grouped"].flops(seq_len, *shape)
            contenders["grouped"] = (dilated(patterns["grouped"], "auto"), flops)
            for length in options.documents:
                borders = [*range(0, seq_len, length), seq_len]
                flops = sum(patterns["all"].flops(end - begin, *shape) for begin, end in pairwise(borders))
                contenders[f"documents of {length}"] = (dilated(patterns["all"], "auto", borders), flops)
            ring = RingDilatedAttention(pattern.segment_lengths, pattern.dilation_rates, ring_size=1)
            contenders["ring of one"] = (partial(ring, is_causal=True), patterns["all"].flops(seq_len, *shape))
            contenders = {name: entry for name, entry in contenders.items() if name not in left_out}
            found = measure(contenders, qkv, grad, options.repeats)
            reference = next((row for row in found if row.contender == "dense"), None)
            limit = next((row for row in found if row.contender == "segments"), None)
            for row in found:
                if limit:
                    work = row.flops / limit.flops
                    row.forward_limits = row.forward_ms / (limit.forward_ms * work)
                    row.limits = row.forward_backward_ms / (limit.forward_backward_ms * work)
                if reference:
                    row.promised = reference.flops / row.flops
                    row.speedup = reference.forward_backward_ms / row.forward_backward_ms
                if row.forward_backward_ms > options.budget * 1e3:
                    left_out.add(row.contender)
            results += found
            progress.advance(task)
    return results


def show(results: list[Measurement], console: Console) -> None:
    table = Table(box=box.SIMPLE)
    for heading in ("N", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in ("fwd ms", "+bwd ms", "MiB", "promised", "speed-up", "kept", "fwd/limit", "+bwd/limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        numbers = (
            row.forward_ms, row.forward_backward_ms, row.peak_mib, row.promised, row.speedup, row.kept,
            row.forward_limits, row.limits,
        )  # fmt: skip
        shown = ("" if number != number else f"{number:,.2f}" for number in numbers)
        table.add_row(str(row.seq_len), row.contender, *shown)
    console.print(table)


def save(results: list[Measurement], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attention.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in fields(Measurement)]
        writer.writerow([*names, "kept"])
        writer.writerows([*(getattr(row, name) for name in names), row.kept] for row in results)

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    lengths = sorted({row.seq_len for row in results})
    titles = ("forward + backward, ms", "peak memory above inputs, MiB")
    for axis, field, title in zip(axes, ("forward_backward_ms", "peak_mib"), titles, strict=True):
        # The segments only set the limit, and a ring of one is the operator itself.
        for name in dict.fromkeys(row.contender for row in results if row.contender not in ("segments", "ring of one")):
            rows = [row for row in results if row.contender == name]
            axis.plot([row.seq_len for row in rows], [getattr(row, field) for row in rows], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="sequence length N", title=title)
        axis.set_xticks(lengths, [f"{n // 2**20}M" if n % 2**20 == 0 else f"{n / 1024:g}K" for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    limited = [row for row in results if row.contender == "dilated sdpa" and row.limits == row.limits]
    limits = [row.forward_backward_ms / row.limits for row in limited]
    axes[0].plot([row.seq_len for row in limited], limits, "k--", label="limit of dilated", zorder=3)
    axes[0].legend()
    figure.savefig(folder / "attention.png", dpi=130)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [8192, 32768, 131072] if gpu else [2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="sequence lengths N")
    parser.add_argument("--heads", type=int, default=16 if gpu else 8, help="query heads H")
    parser.add_argument("--kv-heads", type=int, help="key and value heads; as many as query heads by default")
    parser.add_argument("--head-dim", type=int, default=64, help="D")
    parser.add_argument("--base", type=int, default=2048 if gpu else 512, help="w/r: segment length of the first level")
    parser.add_argument("--ratio", type=int, default=2, help="growth of w and r from level to level")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--documents", type=int, nargs="*", default=[], help="packed ones of these lengths as well")
    parser.add_argument("--pattern", help="a named pattern, such as paper, in the place of the geometric one")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--repeats", type=int, default=20 if gpu else 3, help="runs of each; the median counts")
    parser.add_argument(
        "--budget", type=float, default=60.0, help="a contender slower than this many s is dropped after"
    )
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, such as dense")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_attention"))
    options = parser.parse_args()
    # The table is read as a whole: a narrow terminal wraps it less badly than it would squeeze it.
    console = Console(width=max(110, Console().width))
    results = run(options, console)
    show(results, console)
    save(results, options.output)
    console.print(f"Written: {options.output}/attention.csv and attention.png")


if __name__ == "__main__":
    main()
