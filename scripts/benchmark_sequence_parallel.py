"""Time and memory of one rank of many, at its real shapes, on one device and without communication.

    python scripts/benchmark_sequence_parallel.py --context 1048576 --ranks 1 2 4 8
    python scripts/benchmark_sequence_parallel.py --tokens-per-rank 1048576 --ranks 1 8 64 1024 --model 125m

Without --model it measures one attention, forward and backward; with it, whole training steps of that model of
conf/model, by the plan that memory=auto would take. --context spreads one sequence over more and more ranks;
--tokens-per-rank makes it longer with them. The rank that is measured is the last one, which has the most to attend.

Beside it stand the planner's time and peak, the bytes that this rank would receive in a step (keys and values, their
gradients, and for a model the weights' gradients), and the time they take: at --node-link GB/s where all that exchange
them are within --node ranks, otherwise all of them at --link GB/s. "efficiency" is the work of all ranks per second
over that of so many ranks alone, if nothing of this time is hidden behind the computation.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from longnet.attention import DilationPattern, dilated_attention
from longnet.config.arguments import script
from longnet.config.cli import compose_job
from longnet.config.machine import Machine
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.parallel import FORMS
from longnet.parallel.attention import ShardedOperator
from longnet.parallel.communication import gradient_bytes
from longnet.parallel.mesh import MeshShape
from longnet.parallel.share import SequenceShare, attend_over
from longnet.parallel.solo import SoloGroup
from longnet.planning import (
    MemoryPlan,
    Rates,
    Workload,
    candidate_plans,
    choose_plan,
    count_flops,
    count_parameters,
    predict_memory,
    predict_time,
)
from longnet.planning.time import ATTENTION_BACKWARD, H200
from longnet.training import activation_checkpointing
from longnet.training.memory import device_bytes, host_bytes
from longnet.training.pretrained import new_config
from longnet.training.ranks import RankLayer, rank_layers, rank_workload
from longnet.training.rates import measure_rates
from longnet.training.rehearsal import Rehearsal
from longnet.training.throughput import synchronize

CONF = Path(__file__).resolve().parents[1] / "conf"
GIB, MIB = 2**30, 2**20


@dataclass
class Row:
    """One number of ranks: milliseconds, GiB, FLOPs and bytes of the last rank."""

    ranks: int
    context: int
    plan: str
    measured_ms: float
    predicted_ms: float
    measured_gib: float
    predicted_gib: float
    flops: float
    received: int
    link_ms: float


def decoder_config(options: argparse.Namespace, context: int) -> LongNetConfig:
    """The model that is named, or one layer of the given heads that stands for its attention alone."""
    if options.model:
        keys = [f"model={options.model}", f"data.context_length={context}", "run.name=benchmark"]
        job = compose_job(CONF, [*keys, *options.keys], Machine(gpus=1))
        return new_config(job, job.model.vocab_size or options.vocab_size)
    pattern = DilationPattern.geometric(context, options.base)
    return LongNetConfig(
        hidden_size=options.heads * options.head_dim,
        num_hidden_layers=1,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads or options.heads,
        max_position_embeddings=context,
        attention=[{"name": "dilated", **pattern.to_config()}],
    )


def attention_pass(options: argparse.Namespace, layer: RankLayer, length: int) -> Callable[[], object]:
    layout, device, dtype = layer.layout, torch.device(options.device), getattr(torch, options.dtype)
    operator: Callable[..., Any] = dilated_attention
    if layout.world > 1:
        operator = ShardedOperator(options.form, SoloGroup(layout.rank, layout.world))
    q, k, v, grad = (
        torch.randn(1, length, heads, options.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (layout.num_heads, layout.num_kv_heads, layout.num_kv_heads, layout.num_heads)
    )

    def run() -> object:
        return torch.autograd.grad(operator(q, k, v, layer.pattern), (q, k, v), grad)

    return run


def training_step(
    options: argparse.Namespace, workload: Workload, plan: MemoryPlan, ranks: int
) -> Callable[[], object]:
    device, dtype, length = torch.device(options.device), getattr(torch, options.dtype), workload.context_length
    with device:
        model = LongNetForCausalLM(workload.model)
    model.model.residual_dtype = dtype if dtype != torch.float32 else None
    activation_checkpointing.apply(model, plan.kind, plan.every, plan.tile, workload.compiled)
    if ranks > 1:
        attend_over(model, options.form, SoloGroup(ranks - 1, ranks))
    positions = SequenceShare(MeshShape(1, ranks), ranks - 1).positions(length, device)
    return Rehearsal(model, 1, length, dtype, positions).step


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
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else float("nan")
    return median(times), peak


def measure_ranks(options: argparse.Namespace, ranks: int, rates: Rates) -> Row:
    device, half = torch.device(options.device), options.dtype != "float32"
    context = options.tokens_per_rank * ranks if options.tokens_per_rank else options.context
    config = decoder_config(options, context)
    compiled = device.type == "cuda"
    precision: Literal["bf16", "fp32"] = "bf16" if half else "fp32"
    whole = Workload(config, context, 1, precision, precision, fused_norm=compiled, compiled=compiled)
    layers, workload = rank_layers(whole, ranks, options.form), rank_workload(whole, ranks, options.form)
    received = sum(layer.received for layer in layers)
    seconds = sum(link_seconds(options, layer) for layer in layers)
    if not options.model:
        attention = (1 + ATTENTION_BACKWARD) * layers[0].flops
        took = measure(attention_pass(options, layers[0], workload.context_length), device, options.repeats)
        row = Row(ranks, context, "", took[0], attention / rates.attention * 1e3, took[1], float("nan"), attention,
                  received, seconds * 1e3)  # fmt: skip
    else:
        plans = candidate_plans(workload, host_bytes())
        plan = options.plan or choose_plan(workload, plans, device_bytes(device))
        if plan is None:
            raise SystemExit(f"{workload.context_length:,} positions a rank: no plan fits into this device's memory")
        took = measure(training_step(options, workload, plan, ranks), device, options.repeats)
        weights = gradient_bytes(count_parameters(workload)[0], ranks)
        seconds += weights / bandwidth(options, ranks > options.node)
        row = Row(
            ranks, context, str(plan), took[0], predict_time(workload, plan, rates).total * 1e3, took[1],
            predict_memory(workload, plan).device / GIB, count_flops(workload).training * workload.tokens,
            received + weights, seconds * 1e3,
        )  # fmt: skip
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def link_seconds(options: argparse.Namespace, layer: RankLayer) -> float:
    """What a layer's exchange takes, level by level: each as fast as the widest of its segments allows."""
    leaving: set[int | None] = {
        rows.segment.level
        for rows in layer.layout.segments()
        if rows.segment.ranks[0] // options.node != rows.segment.ranks[-1] // options.node
    }
    if layer.layout.world > options.node:
        leaving.add(None)
    seconds = 0.0
    for level in layer.traffic:
        received = level.forward.received + level.backward.received
        seconds += received / bandwidth(options, level.level in leaving)
    return seconds


def bandwidth(options: argparse.Namespace, leaves_node: bool) -> float:
    return float(options.link if leaves_node else options.node_link) * 1e9


def show(rows: list[Row], options: argparse.Namespace) -> Table:
    what = f"training steps of {options.model}" if options.model else "one attention, forward and backward"
    table = Table(box=box.SIMPLE, title=f"{what}: {options.form}, {options.device} {options.dtype}")
    for name in (
        "ranks", "tokens", "ms", "planned", "GiB", "planned", "TFLOP", "received MiB", "at link ms", "tokens/s",
        "efficiency",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    # A rank alone that does the work of its share as fast as the first row does.
    first = rows[0]
    alone = first.measured_ms / (first.context / first.ranks)
    for row in rows:
        whole = row.measured_ms + row.link_ms
        cells = (
            (row.ranks, ","), (row.context, ","), (row.measured_ms, ",.1f"), (row.predicted_ms, ",.1f"),
            (row.measured_gib, ".1f"), (row.predicted_gib, ".1f"), (row.flops / 1e12, ",.4g"),
            (row.received / MIB, ",.1f"), (row.link_ms, ".2f"), (row.context / whole * 1e3, ",.0f"),
            (alone * row.context / row.ranks / whole, ".1%"),
        )  # fmt: skip
        table.add_row(*("" if number != number else format(number, form) for number, form in cells))
    plans = {row.plan for row in rows if row.plan}
    table.caption = "; ".join(sorted(plans))
    return table


def memory_plan(text: str) -> MemoryPlan:
    kind, _, tile = text.partition("/")
    return MemoryPlan(kind, 1, int(tile) if tile else None)  # type: ignore[arg-type]


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--context", type=int, default=2**17, help="positions of the whole sequence")
    length.add_argument("--tokens-per-rank", type=int, help="positions of a rank, of a sequence as long as the ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks that share it")
    parser.add_argument("--form", choices=FORMS, default="gather")
    parser.add_argument("--base", type=int, default=2048, help="first segment length of the geometric pattern")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--model", help="of conf/model: whole training steps in the place of one attention")
    parser.add_argument("--keys", nargs="*", default=[], help="other keys of train.py, for the model")
    parser.add_argument("--plan", type=memory_plan, help="KIND or KIND/TILE; by default the one of memory=auto")
    parser.add_argument("--vocab-size", type=int, default=50304 if gpu else 512, help="where the model sets none")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--node", type=int, default=8, help="neighbouring ranks that the faster link joins")
    parser.add_argument("--node-link", type=float, default=450.0, help="GB/s into a rank from its node (NVLink 4)")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s into a rank from elsewhere (400 Gbit/s)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(words)
    torch.set_float32_matmul_precision("high")

    device = torch.device(options.device)
    rates = (
        H200 if gpu and "H200" in torch.cuda.get_device_name() else measure_rates(device, getattr(torch, options.dtype))
    )
    console = Console(width=140)
    rows = []
    for ranks in options.ranks:
        rows.append(measure_ranks(options, ranks, rates))
        # What is known so far is not lost if a later one fails.
        print(rows[-1], flush=True)
    console.print(show(rows, options))


if __name__ == "__main__":
    main()
