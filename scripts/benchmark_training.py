"""Whole training steps: tokens a second, share of the device's own matmul rate, memory, and where the time goes.

    python scripts/benchmark_training.py --lengths 32768 131072 --contenders longnet dense llama llama/full
    python scripts/benchmark_training.py --model 1b --lengths 65536 --contenders longnet/full llama/full
    python scripts/benchmark_training.py --lengths 4194304 --contenders longnet/offload/16384

A contender is NAME, NAME/CHECKPOINTING or NAME/CHECKPOINTING/TILE. ``longnet`` is the model of conf/model with
conf/attention's dilated block, ``dense`` the same model with dense attention, ``llama`` transformers' Llama of the same
size (SDPA, weights in bf16, fused AdamW). On a CPU all is fp32. One sequence a step: forward, loss, backward, clipping,
optimizer. MFU counts the pairs that attention sees and no recomputation, against a large matrix product in the same
run. Writes a table (CSV) and a plot (PNG) into --output, together with what earlier commands have left there.
"""

from __future__ import annotations

import argparse
import csv
import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from longnet.config.arguments import script
from longnet.config.cli import compose_job
from longnet.config.schema import JobConfig
from longnet.model import LongNetForCausalLM
from longnet.training import activation_checkpointing
from longnet.training.loss import linear_cross_entropy
from longnet.training.optim import build_optimizer
from longnet.training.pretrained import new_config
from longnet.training.throughput import (
    measure_matmul_rate,
    peak_memory_gib,
    reset_peak_memory,
    synchronize,
    training_flops_per_token,
)

CONF = Path(__file__).parents[1] / "conf"
ATTENTION_KERNELS = re.compile(r"sdpa|flash|fmha|_merge_kernel|_sum_kernel|dot_do_o|convert_dq")
OPTIMIZER_KERNELS = re.compile(r"adam|multi_tensor", re.IGNORECASE)


@dataclass
class Measurement:
    model: str
    contender: str
    seq_len: int
    step_ms: float = float("nan")
    tokens_per_second: float = float("nan")
    mfu: float = float("nan")
    peak_gib: float = float("nan")
    attention_share: float = float("nan")
    loss_share: float = float("nan")
    optimizer_share: float = float("nan")
    note: str = ""


@dataclass
class Contender:
    """A model that can take a training step on (input_ids, labels), and what a token costs."""

    model: PreTrainedModel
    loss: Callable[[Tensor, Tensor], Tensor]
    flops_per_token: float


def build_longnet(
    job: JobConfig, vocab_size: int, checkpointing: str, tile: int | None, device: torch.device, compiled: bool
) -> Contender:
    with torch.device(device):
        model = LongNetForCausalLM(new_config(job, vocab_size))
    half = device.type == "cuda"
    model.model.residual_dtype = torch.bfloat16 if half else None
    activation_checkpointing.apply(model, checkpointing, tile=tile, compiled=compiled)

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            hidden = model.model(input_ids)
            with torch.profiler.record_function("loss"):
                sums = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())
        return sums.loss / sums.tokens

    return Contender(model, loss, training_flops_per_token(model, job.data.context_length))


def build_llama(job: JobConfig, vocab_size: int, checkpointing: str, device: torch.device) -> Contender:
    """The model that a transformers user would train: its gated MLP has as many weights as ours."""
    shape, context = job.model, job.data.context_length
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size if shape.gated_mlp else shape.intermediate_size * 2 // 3,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = LlamaForCausalLM(config)
    nn.Module.to(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if checkpointing == "full":
        model.gradient_checkpointing_enable()
    model.train()
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    pairs = (context + 1) / 2
    attention = 4 * pairs * config.hidden_size * config.num_hidden_layers

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = model(input_ids=input_ids, labels=labels).loss
        return result

    return Contender(model, loss, 3 * (2 * products + attention))


def build(options: argparse.Namespace, spec: str, seq_len: int, device: torch.device) -> Contender:
    name, checkpointing, tile = [*spec.split("/"), None, None][:3]
    attention = "dense" if name == "dense" else options.attention
    words = [f"model={options.model}", f"attention={attention}", f"data.context_length={seq_len}"]
    job = compose_job(CONF, [*words, "run.name=benchmark"])
    vocab_size = job.model.vocab_size or options.vocab_size
    if name == "llama":
        return build_llama(job, vocab_size, checkpointing or "none", device)
    if name not in ("longnet", "dense"):
        raise ValueError(f"contender {spec!r}: expected longnet, dense or llama, then /CHECKPOINTING and /TILE")
    return build_longnet(
        job, vocab_size, checkpointing or "none", int(tile) if tile else None, device, device.type == "cuda"
    )


def measure(contender: Contender, seq_len: int, repeats: int, device: torch.device) -> Measurement:
    model = contender.model
    optimizer = build_optimizer(model, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    generator = torch.Generator(device).manual_seed(0)
    vocab_size: int = model.config.vocab_size
    input_ids, labels = (torch.randint(vocab_size, (1, seq_len), device=device, generator=generator) for _ in range(2))

    def step() -> None:
        contender.loss(input_ids, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    # The first step compiles; the second one has the optimizer's state from the beginning.
    for _ in range(2):
        step()
    synchronize(device)
    reset_peak_memory(device)
    times = [timed(step, device) for _ in range(repeats)]
    seconds = median(times)
    row = Measurement("", "", seq_len, seconds * 1e3, seq_len / seconds, peak_gib=peak_memory_gib(device))
    if device.type == "cuda" and seconds < 5:
        row.attention_share, row.loss_share, row.optimizer_share = shares(step)
    return row


def timed(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def shares(step: Callable[[], None]) -> tuple[float, float, float]:
    """The parts of a step's kernel time that attention, the loss and the optimizer take."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    totals = dict.fromkeys(("all", "attention", "loss", "optimizer"), 0.0)
    for event in profiler.key_averages():
        if event.key == "loss" and event.device_type == torch.autograd.DeviceType.CPU:
            totals["loss"] += event.device_time_total
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        totals["all"] += event.self_device_time_total
        for part, kernels in (("attention", ATTENTION_KERNELS), ("optimizer", OPTIMIZER_KERNELS)):
            if kernels.search(event.key):
                totals[part] += event.self_device_time_total
    attention, loss, optimizer = (totals[part] / totals["all"] for part in ("attention", "loss", "optimizer"))
    return attention, loss, optimizer


def run(options: argparse.Namespace, console: Console) -> list[Measurement]:
    device = torch.device(options.device)
    rate = measure_matmul_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    console.print(f"{options.model}, attention {options.attention}; matmul {rate / 1e12:,.1f} TFLOP/s on {device}")
    results = []
    for seq_len in options.lengths:
        for spec in options.contenders:
            torch.compiler.reset()
            row = try_measuring(options, spec, seq_len, device, rate)
            results.append(row)
            console.print(describe(row), highlight=False)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def try_measuring(
    options: argparse.Namespace, spec: str, seq_len: int, device: torch.device, rate: float
) -> Measurement:
    try:
        contender = build(options, spec, seq_len, device)
        row = measure(contender, seq_len, options.repeats, device)
    except torch.OutOfMemoryError:
        return Measurement(options.model, spec, seq_len, note="out of memory")
    row.model, row.contender = options.model, spec
    row.mfu = contender.flops_per_token * row.tokens_per_second / rate
    return row


def describe(row: Measurement) -> str:
    if row.note:
        return f"{row.seq_len:>9,}  {row.contender:24} {row.note}"
    return (
        f"{row.seq_len:>9,}  {row.contender:24} {row.tokens_per_second:>10,.0f} tokens/s  MFU {row.mfu:.1%}  "
        f"{row.peak_gib:.1f} GiB"
    )


def show(results: list[Measurement], console: Console) -> None:
    table = Table(box=box.SIMPLE)
    for heading in ("N", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step ms", "tokens/s", "MFU", "GiB", "attention", "loss", "optimizer", "times the last"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        # The last contender of a length is the one that the others are compared with.
        last = [other for other in results if other.seq_len == row.seq_len][-1]
        shown = [
            "" if number != number else form.format(number)
            for number, form in (
                (row.step_ms, "{:,.1f}"), (row.tokens_per_second, "{:,.0f}"), (row.mfu, "{:.1%}"),
                (row.peak_gib, "{:.1f}"), (row.attention_share, "{:.0%}"), (row.loss_share, "{:.0%}"),
                (row.optimizer_share, "{:.0%}"), (row.tokens_per_second / last.tokens_per_second, "{:.2f}"),
            )
        ]  # fmt: skip
        table.add_row(f"{row.seq_len:,}", f"{row.contender} {row.note}", *shown)
    console.print(table)


def save(results: list[Measurement], folder: Path) -> None:
    """Adds the results to those of earlier runs in the folder, and draws all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "training.csv"
    known = {(row.model, row.contender, row.seq_len): row for row in [*read(table), *results]}
    with table.open("w", newline="") as file:
        names = [field.name for field in fields(Measurement)]
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in known.values())
    draw(list(known.values()), folder / "training.png")


def read(table: Path) -> list[Measurement]:
    if not table.exists():
        return []
    types = {"model": str, "contender": str, "seq_len": int, "note": str}
    with table.open(newline="") as file:
        return [
            Measurement(**{name: types.get(name, float)(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


def draw(results: list[Measurement], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    models = list(dict.fromkeys(row.model for row in results))
    names = list(dict.fromkeys(row.contender.split("/")[0] for row in results))
    lengths = sorted({row.seq_len for row in results})
    for axis, field in zip(axes, ("tokens_per_second", "peak_gib"), strict=True):
        for model, line in zip(models, ("-", "--", ":", "-."), strict=False):
            for color, name in enumerate(names):
                # Of several plans for a length, the fastest.
                best: dict[int, Measurement] = {}
                for row in sorted(results, key=lambda row: (row.seq_len, row.tokens_per_second)):
                    if not row.note and (row.model, row.contender.split("/")[0]) == (model, name):
                        best[row.seq_len] = row
                values = [getattr(row, field) for row in best.values()]
                style = {"marker": "o", "linestyle": line, "color": f"C{color}"}
                if best:
                    axis.plot(list(best), values, label=f"{model} {name}", **style)
                for row, value in zip(best.values(), values, strict=True):
                    plan = "/".join(row.contender.split("/")[1:])
                    place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                    axis.annotate(plan, (row.seq_len, value), fontsize=7, color=f"C{color}", **place)
        axis.set(xscale="log", yscale="log", xlabel="tokens in a sequence")
        axis.set_xticks(lengths, [f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" for n in lengths])
        axis.minorticks_off()
        axis.margins(x=0.12, y=0.12)
        axis.grid(alpha=0.3)
    for axis, title in zip(axes, ("tokens a second", "peak memory, GiB"), strict=True):
        axis.set_title(title)
        low, high = axis.get_ylim()
        ticks = [digit * 10**power for power in range(8) for digit in (1, 2, 5) if low <= digit * 10**power <= high]
        axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes[0].legend(fontsize=8)
    figure.savefig(target, dpi=130)


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m" if gpu else "tiny", help="of conf/model")
    parser.add_argument("--attention", default="dilated", help="of conf/attention, for longnet")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072] if gpu else [1024])
    parser.add_argument("--contenders", nargs="+", default=["longnet", "dense", "llama"])
    parser.add_argument("--vocab-size", type=int, default=50304 if gpu else 512, help="where the model sets none")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each; the median counts")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_training"))
    options = parser.parse_args(words)
    torch.set_float32_matmul_precision("high")
    console = Console(width=max(120, Console().width))
    results = run(options, console)
    show(results, console)
    save(results, options.output)
    console.print(f"Written: {options.output}/training.csv and training.png")


if __name__ == "__main__":
    main()
