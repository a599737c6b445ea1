"""What a job takes, before anything is built: parameters, FLOPs, memory and time by every plan, bytes between ranks.

    python scripts/plan.py model=125m data.context_length=1048576 data.batch_size=1 trainer.residual=bf16
    python scripts/plan.py model=1b data.context_length=131072 data.batch_size=1 --device h200
    python scripts/plan.py model=125m data.context_length=262144 data.batch_size=1 --device h200 --patterns
    python scripts/plan.py model=125m data.context_length=65536 data.batch_size=1 --measure    # the plans that fit

Takes the keys of train.py. Memory and rates are this machine's, measured in a moment, unless --device names a known one
or they are given. --measure trains two steps by each plan that fits, on random tokens, and shows the peak beside the
prediction, and the second step's tokens per second. --patterns compares patterns for the context.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from longnet.attention import DilationPattern
from longnet.config import JobConfig
from longnet.config.arguments import script
from longnet.config.bounds import NOT_NEGATIVE, POSITIVE
from longnet.config.cli import compose_job
from longnet.config.machine import Machine
from longnet.data.tokenizer import ByteTokenizer
from longnet.model import LongNetForCausalLM
from longnet.parallel.communication import LevelTraffic, gradient_bytes, held_bytes
from longnet.planning import (
    MemoryPlan,
    Rates,
    Workload,
    candidate_plans,
    choose_plan,
    count_flops,
    count_parameters,
    longest_context,
    pattern_choices,
    predict_memory,
    predict_time,
    recommend,
    recomputed_flops,
    suggest_savings,
)
from longnet.planning.time import KNOWN
from longnet.training import activation_checkpointing
from longnet.training.memory import device_bytes, host_bytes
from longnet.training.placement import Placement, place
from longnet.training.pretrained import new_config, pretrained_config
from longnet.training.ranks import rank_layers, rank_workload
from longnet.training.rates import measure_rates
from longnet.training.rehearsal import Rehearsal
from longnet.training.throughput import synchronize

CONF = Path(__file__).resolve().parents[1] / "conf"
GIB = 2**30
# Memory of the devices in KNOWN, as torch sees it.
KNOWN_GIB = {"h200": 139.8}


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    arguments = parse_arguments(words)
    elsewhere = arguments.device != "here"
    machine = Machine(gpus=8, multi_node_launcher=True) if elsewhere else None
    job = compose_job(CONF, arguments.overrides, machine)
    placement = Placement("cuda", "bf16-mixed", True) if elsewhere else place(job.trainer)
    device = torch.device("cpu" if elsewhere else placement.accelerator)
    given = KNOWN_GIB.get(arguments.device) if arguments.device_gib is None else arguments.device_gib
    room = device_bytes(device) if given is None else int(given * GIB)
    host = host_bytes() if arguments.host_gib is None else int(arguments.host_gib * GIB)

    console = Console(width=max(120, Console().width))
    whole = build_workload(job, placement)
    ranks = job.strategy.sequence_parallel_size
    workload = rank_workload(whole, ranks, job.strategy.sequence_parallel)
    rates = choose_rates(arguments, device, placement, workload)
    show_workload(console, whole)
    received = show_ranks(console, job, whole) if ranks > 1 else 0
    plans = candidate_plans(workload, host)
    chosen = choose_plan(workload, plans, room)
    console.print(show_plans(workload, plans, chosen, rates, received, room, arguments.measure, placement, device))
    show_answer(console, workload, chosen, room, host, ranks)
    if arguments.patterns:
        show_patterns(console, whole)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="keys of train.py, as key=value")
    parser.add_argument("--device", choices=["here", *KNOWN], default="here", help="whose rates and memory count")
    parser.add_argument("--device-gib", type=float, help="memory of the device")
    parser.add_argument("--host-gib", type=float, help="memory of the host")
    parser.add_argument("--matmul-tflops", type=float, help="of large matrix products")
    parser.add_argument("--attention-tflops", type=float, help="of the attention's kernels, over the pairs seen")
    parser.add_argument("--bandwidth-gbs", type=float, help="GB/s of the device's memory")
    parser.add_argument("--link-gbs", type=float, default=50.0, help="GB/s that a rank receives from others")
    parser.add_argument("--measure", action="store_true", help="train two steps by each plan that fits")
    parser.add_argument("--patterns", action="store_true", help="compare patterns for the context")
    arguments = parser.parse_intermixed_args(words)
    if arguments.measure and arguments.device != "here":
        parser.error(f"--measure trains on this machine: expected no --device {arguments.device} with it")
    for name, value in vars(arguments).items():
        # A host without room is one that nothing is offloaded to; the others divide, or hold a model.
        bound = NOT_NEGATIVE if name == "host_gib" else POSITIVE
        if isinstance(value, float) and not (bound.admits(value) and math.isfinite(value)):
            flag, nearest = name.replace("_", "-"), bound.nearest(value)
            parser.error(f"--{flag} {value:g}: expected a finite number {bound}{nearest}")
    return arguments


def choose_rates(
    arguments: argparse.Namespace, device: torch.device, placement: Placement, workload: Workload
) -> Rates:
    given = (arguments.matmul_tflops, arguments.attention_tflops, arguments.bandwidth_gbs)
    if arguments.device in KNOWN:
        rates = KNOWN[arguments.device]
    elif None not in given:
        rates = Rates("given", 1.0, 1.0, 1.0)
    else:
        rates = measure_rates(device, placement.matmul_dtype, workload)
    units = {"matmul": 1e12, "attention": 1e12, "bandwidth": 1e9}
    changes = {name: value * units[name] for name, value in zip(units, given, strict=True) if value is not None}
    return replace(rates, link=arguments.link_gbs * 1e9, **changes)


def build_workload(job: JobConfig, placement: Placement) -> Workload:
    context = job.data.context_length
    config = pretrained_config(job) if job.model.pretrained else new_config(job, ByteTokenizer.vocab_size)
    on_gpu, residual = placement.accelerator == "cuda", job.trainer.residual
    fused_norm = on_gpu and (residual == "fp32" or placement.compile)
    precision = placement.precision_name
    return Workload(config, context, job.data.batch_size, precision, residual, fused_norm, placement.compile)


def show_workload(console: Console, workload: Workload) -> None:
    total, layer = count_parameters(workload)
    flops = count_flops(workload)
    layers = workload.model.num_hidden_layers
    console.print(
        f"{total / 1e6:,.1f} M parameters: {layers} layers of {layer / 1e6:.2f} M, embedding and head "
        f"{(total - layers * layer) / 1e6:.1f} M",
        highlight=False,
    )
    parts = {
        "attention": flops.attention,
        "its projections": flops.attention_inputs + flops.attention_output,
        "MLP": flops.mlp,
        "head": flops.head,
    }
    table = Table("GFLOP a token", "forward", "with backward", "share", box=box.SIMPLE_HEAD)
    for name, part in {**parts, "all": flops.forward}.items():
        table.add_row(name, f"{part / 1e9:.4g}", f"{3 * part / 1e9:.4g}", f"{part / flops.forward:.0%}")
    console.print(table)
    estimate = predict_memory(workload, MemoryPlan())
    fixed = ", ".join(f"{part} {getattr(estimate, part) / GIB:.3g}" for part in ("weights", "gradients", "optimizer"))
    console.print(f"GiB whatever the plan: {fixed}", highlight=False)


def show_ranks(console: Console, job: JobConfig, workload: Workload) -> int:
    """What the last rank computes and receives in a step, level by level; gives the bytes of all layers."""
    ranks, form = job.strategy.sequence_parallel_size, job.strategy.sequence_parallel
    layers = rank_layers(workload, ranks, form)
    table = Table(
        "a layer, last rank", "TFLOP", "share of all", "MiB forward", "backward", "messages", box=box.SIMPLE_HEAD
    )
    for layer in layers[: len(workload.model.attention)]:
        traffic = {level.level: level for level in layer.traffic}
        for level, (segment, rate) in enumerate(layer.pattern.levels):
            work = layer.work[level].own + layer.work[level].others
            whole = workload.batch_size * level_flops(workload, layer.pattern, level)
            row = [f"w/r {segment}/{rate}", f"{work / 1e12:.4g}", f"{work / max(1, whole):.2%}"]
            table.add_row(*row, *show_level(traffic.get(level)))
        if None in traffic:
            table.add_row("all", "", "", *show_level(traffic[None]))
    console.print(table)
    received = sum(layer.received for layer in layers)
    world = job.trainer.devices * job.trainer.num_nodes
    gradients = gradient_bytes(count_parameters(workload)[0], world, job.strategy.name.endswith("fsdp"))
    held = max(held_bytes(form, layer.traffic) for layer in layers)
    console.print(
        f"{form}: {received / 2**20:,.0f} MiB a step to a rank, over {ranks} ranks, of which it holds "
        f"{held / 2**20:,.0f} MiB at a time; and {gradients / 2**20:,.0f} MiB for the weights' gradients",
        highlight=False,
    )
    return received + gradients


def level_flops(workload: Workload, pattern: DilationPattern, level: int) -> int:
    model = workload.model
    return 4 * int(model.head_dim) * pattern.level_edges(level, workload.context_length, model.num_attention_heads)


def show_level(traffic: LevelTraffic | None) -> list[str]:
    if traffic is None:
        return ["0", "0", "0"]
    sizes = [f"{part.received / 2**20:.4g}" for part in (traffic.forward, traffic.backward)]
    return [*sizes, str(traffic.forward.messages + traffic.backward.messages)]


def show_plans(
    workload: Workload, plans: Sequence[MemoryPlan], chosen: MemoryPlan | None, rates: Rates, received: int, room: int,
    measured: bool, placement: Placement, device: torch.device,
) -> Table:  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, title=f"time on {rates.name}", title_justify="left", title_style="dim")
    parts = ("device", "kept", "working", "loss", "host")
    table.add_column("kind, GiB:")
    heads = ("tile", *parts, "again", "step s", "tokens/s", *(["peak", "measured/s"] if measured else []))
    for column in heads:
        table.add_column(column, justify="right")
    for plan in plans:
        estimate = predict_memory(workload, plan)
        seconds = predict_time(workload, plan, rates, received).total
        row = [plan.kind, f"{plan.tile or ''}", *(f"{getattr(estimate, part) / GIB:.3g}" for part in parts)]
        row.append(f"{recomputed_flops(workload, plan) / count_flops(workload).training:.0%}")
        row += [f"{seconds:.3g}", f"{workload.tokens / seconds:,.0f}"]
        if measured:
            row += measure(workload, plan, placement, device) if estimate.device <= room else ["", ""]
        table.add_row(*row, style="bold" if plan == chosen else None)
    return table


def show_answer(
    console: Console, workload: Workload, chosen: MemoryPlan | None, room: int, host: int, ranks: int
) -> None:
    if chosen:
        console.print(f"memory=auto takes {chosen}", highlight=False)
        return
    console.print(f"nothing fits into {room / GIB:.3g} GiB; what would help:", highlight=False)
    context = longest_context(workload, room, host) * ranks
    nearest = f"data.context_length={context} fits" if context else "no context fits: take a smaller model"
    console.print(f"  {nearest}", highlight=False)
    last = MemoryPlan("offload", tile=16384)
    for saving in suggest_savings(workload, last):
        console.print(f"  {saving.change}: {saving.bytes / GIB:.3g} GiB less", highlight=False)


def show_patterns(console: Console, workload: Workload) -> None:
    choices = pattern_choices(workload)
    best = recommend(choices)
    heads = ("base", "ratio", "levels", "keys a query", "coarsest rate", "coverage", "share of FLOPs")
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in choices:
        cells = (each.base, each.ratio, each.levels, f"{each.keys:,}", each.coarsest, f"{each.coverage:.0%}")
        table.add_row(*map(str, cells), f"{each.share:.0%}", style="bold" if each == best else None)
    console.print(table)
    if best:
        console.print(f"take attention.dilated.base={best.base} attention.dilated.ratio={best.ratio}", highlight=False)


def measure(workload: Workload, plan: MemoryPlan, placement: Placement, device: torch.device) -> list[str]:
    """The peak on the device in GiB, and tokens per second; nothing where memory ran out or is not counted."""
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with device:
        model = LongNetForCausalLM(workload.model)
    if workload.residual_bytes == 2:
        model.model.residual_dtype = torch.bfloat16
    activation_checkpointing.apply(model, plan.kind, plan.every, plan.tile, placement.compile)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[workload.precision]
    rehearsal = Rehearsal(model, workload.batch_size, workload.context_length, dtype)
    seconds = 0.0
    try:
        for _ in range(2):
            start = time.perf_counter()
            rehearsal.step()
            synchronize(device)
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError:
        return ["out of memory", ""]
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if on_gpu else ""
    return [peak, f"{workload.tokens / seconds:,.0f}"]


if __name__ == "__main__":
    main()
