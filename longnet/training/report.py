"""The end of a run: the curve as a picture, and its last lines on the screen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from transformers import PreTrainedModel

from longnet.data import Tokenizer
from longnet.evaluation.baselines import Baselines

from .environment import command_line
from .metrics import read_metrics
from .rundir import RunDirectory

SAMPLE_TEMPERATURE = 0.8


def plot_loss(metrics: Path, target: Path, title: str, baselines: Baselines | None = None) -> None:
    """Draws training and validation loss over the steps; bits per byte on the right where they are known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(metrics)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    training = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    validation = [(row["step"], row["val/loss"]) for row in rows if "val/loss" in row]
    if training:
        axes.plot(*zip(*training, strict=True), label="training", color="#9aa5b1", linewidth=1.2)
    if validation:
        axes.plot(*zip(*validation, strict=True), label="validation", color="#1f6feb", linewidth=2, marker="o", ms=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    if factor := _bits_per_nat(rows):

        def to_bits(nats: Any) -> Any:
            return nats * factor

        def to_nats(bits: Any) -> Any:
            return bits / factor

        axes.secondary_yaxis("right", functions=(to_bits, to_nats)).set_ylabel("bits per byte")
        for label, bits in (("unigram", baselines.unigram), ("xz", baselines.xz)) if baselines else ():
            axes.axhline(to_nats(bits), color="#57606a", linestyle="--", linewidth=1)
            axes.annotate(
                label, (0.995, to_nats(bits)), xycoords=("axes fraction", "data"), ha="right", va="bottom", size=9
            )
    axes.grid(alpha=0.25)
    if training or validation:
        axes.legend()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def generate_sample(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, num_tokens: int, seed: int) -> str:
    """The prompt and how the model continues it, within its context; the same for the same weights and seed."""
    ids = torch.as_tensor(tokenizer.encode(prompt or "\n").astype("int64"), device=model.device)[None]
    context = model.config.max_position_embeddings
    ids = ids[:, -(context - 1) :]
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(num_tokens, context - ids.shape[1]),
            do_sample=True,
            temperature=SAMPLE_TEMPERATURE,
            top_k=0,
            pad_token_id=tokenizer.pad_id,
            eos_token_id=tokenizer.eos_id,
        )
    model.train(was_training)
    return tokenizer.decode(output[0].cpu().numpy()).decode("utf-8", "replace")


def show_summary(
    console: Console,
    run: RunDirectory,
    baselines: Baselines | None,
    sample: str | None,
) -> None:
    """Validation beside the baselines, a sample, where the run lies, and what to try next."""
    rows = read_metrics(run.metrics)
    final = next((row for row in reversed(rows) if "val/loss" in row), None)
    if final is not None:
        console.print()
        console.print(_comparison(final, baselines))
    if sample is not None:
        title = f"sample at temperature {SAMPLE_TEMPERATURE}"
        console.print(Panel(escape(_printable(sample).rstrip()), title=title, title_align="left", border_style="dim"))
    waits = [row["data_wait"] for row in rows if "data_wait" in row]
    # Below that nobody would change anything.
    if waits and (share := sum(waits) / len(waits)) >= 0.02:
        console.print(f"data  {share:.0%} of the training time was spent waiting for it", highlight=False)
    console.print(f"run   {escape(str(run.path))}", highlight=False, soft_wrap=True)
    console.print(f"next  {escape(_next_command())}", highlight=False, soft_wrap=True)


def _comparison(final: Mapping[str, float], baselines: Baselines | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    if "val/bits_per_byte" not in final:
        table.add_column("validation loss")
        table.add_row(f"{final['val/loss']:.3f}")
        return table
    table.add_column("validation")
    table.add_column("bits per byte", justify="right")
    entries = [(f"[bold green]this model, step {final['step']:.0f}", final["val/bits_per_byte"])]
    if baselines is not None:
        entries += [("xz -9e on the same bytes", baselines.xz), ("unigram entropy", baselines.unigram)]
    for name, bits in sorted(entries, key=lambda entry: entry[1]):
        table.add_row(name, f"{bits:.3f}")
    return table


def _bits_per_nat(rows: list[dict[str, float]]) -> float | None:
    final = next((row for row in reversed(rows) if "val/bits_per_byte" in row), None)
    return final["val/bits_per_byte"] / final["val/loss"] if final else None


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _next_command() -> str:
    # The same job with the three kinds of attention, side by side, in one process each.
    replaced = ("attention=", "run.name=", "resume=", "strategy", "trainer.devices=", "trainer.num_nodes=", "-")
    ours = [argument for argument in command_line()[1:] if not argument.startswith(replaced)]
    return shlex.join(["python", "train.py", "-m", *ours, "attention=dense,dilated,sliding_window"])
