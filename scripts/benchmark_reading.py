"""Reads a stream of tokens in one context, and shows that neither memory nor speed depend on how much was read.

    python scripts/benchmark_reading.py tokens=1073741824 piece=1048576 report=16 output=docs/images/reading
    python scripts/benchmark_reading.py tokens=32768 context=1e6 decode_tokens=64    the rate of steps behind them

The model has random weights, since what it computes does not matter for what it costs; its pattern is geometric and
reaches the whole stream. Tokens are drawn on the device.

tokens: how many to read.  piece: tokens read at once; a power of two lines up with the segments.
report: pieces between two rows of the table.  decode_tokens: steps of one token that are timed at the end; 0 is none.
hidden_size, layers, heads, kv_heads, intermediate_size: the model's shape.
context: how far the pattern reaches; null is all of the tokens.
base, ratio: the pattern's first segment, and by how much segments and rates grow.
output: path of a .csv and a .png without the ending; null writes none.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longnet.config.arguments import parse_arguments, script
from longnet.config.errors import ConfigError

COLUMNS = ("tokens", "tokens_per_second", "steps_per_second", "cache_bytes", "peak_bytes")
Row = dict[str, float]


@dataclass
class Options:
    tokens: int = 2**20
    context: int | None = None
    piece: int = 2**16
    report: int = 1
    decode_tokens: int = 0
    hidden_size: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 768
    base: int = 4096
    ratio: int = 4
    seed: int = 0
    output: str | None = None


def measure(options: Options) -> Iterator[Row]:
    """A row for every ``report`` pieces: the rates since the last one, and the memory by then."""
    import torch

    from longnet.attention import DilationPattern
    from longnet.model import LongNetCache, LongNetConfig, LongNetForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = options.context or options.tokens
    pattern = DilationPattern.geometric(context, options.base, options.ratio)
    print(f"{pattern} on {device.type}", file=sys.stderr)
    torch.manual_seed(options.seed)
    config = LongNetConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=context,
        attention=[{"name": "dilated", **pattern.to_config()}],
    )
    with device:
        model = LongNetForCausalLM(config).eval()
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    def settle() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def read(length: int, cache: LongNetCache) -> None:
        model.model(torch.randint(config.vocab_size, (1, length), device=device), past_key_values=cache)

    with torch.inference_mode():
        # Kernels are compiled for the first piece and for the first one behind another.
        if options.tokens > options.piece:
            unmeasured = LongNetCache(config)
            read(options.piece, unmeasured)
            read(options.piece, unmeasured)
            del unmeasured
        cache = LongNetCache(config)
        started, reported = settle(), 0
        pieces = -(-options.tokens // options.piece)
        for number in range(1, pieces + 1):
            read(min(options.piece, options.tokens - cache.columns), cache)
            if number % options.report and number < pieces:
                continue
            now = settle()
            row: Row = {"tokens": cache.columns, "tokens_per_second": (cache.columns - reported) / (now - started)}
            # Only at the end, since it leaves the pieces' grid.
            if options.decode_tokens and number == pieces:
                # The first step builds what the others find ready.
                read(1, cache)
                now = settle()
                for _ in range(options.decode_tokens):
                    read(1, cache)
                row["steps_per_second"] = options.decode_tokens / (settle() - now)
            row["cache_bytes"] = cache.num_bytes
            row["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            yield row
            started, reported = settle(), cache.columns


def plot(rows: list[Row], target: Path) -> None:
    """Speed and memory over the tokens that were read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    tokens = [row["tokens"] for row in rows]
    above.plot(tokens, [row["tokens_per_second"] / 1e6 for row in rows], color="#1f6feb")
    above.set(ylabel="million tokens/s", ylim=(0, None), title="One context, read piece by piece")
    for name, label in (("peak_bytes", "peak memory"), ("cache_bytes", "cache")):
        below.plot(tokens, [row[name] / 2**30 for row in rows], label=label)
    below.set(xlabel="tokens read", ylabel="GiB", ylim=(0, None), xscale="log")
    below.legend()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    options = parse_arguments(Options, words, __doc__ or "")
    counts = ("tokens", "piece", "report", "hidden_size", "layers", "heads", "kv_heads", "base")
    if problems := [f"{key}={vars(options)[key]}: expected at least 1" for key in counts if vars(options)[key] < 1]:
        raise ConfigError(problems)
    rows = []
    print(f"{'tokens':>16} {'tokens/s':>12} {'steps/s':>9} {'cache MiB':>10} {'peak MiB':>10}")
    for row in measure(options):
        rows.append(row)
        steps = f"{row['steps_per_second']:.1f}" if "steps_per_second" in row else ""
        memory = f"{row['cache_bytes'] / 2**20:>10.1f} {row['peak_bytes'] / 2**20:>10.1f}"
        print(f"{row['tokens']:>16,.0f} {row['tokens_per_second']:>12,.0f} {steps:>9} {memory}", flush=True)
    if options.output:
        target = Path(options.output)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        plot(rows, target.with_suffix(".png"))


if __name__ == "__main__":
    main()
