"""Measures a trained model: its loss by context and by position, and whether it finds again what stands far back.

    python scripts/evaluate.py run=runs/NAME                              a run that train.py has finished, on its data
    python scripts/evaluate.py run=runs/NAME contexts=[2048,8192,32768]   windows of these lengths, on the same tokens
    python scripts/evaluate.py model=DIR source=text path=books/          a checkpoint, on other text
    python scripts/evaluate.py run=runs/NAME tasks=[passkey,multi_hop] lengths=[4096,16384] placements=true

Leaves results.json and a CSV file a table in the run's directory, under evaluation/; docs/evaluation.md explains them.

run, model: what to measure, one of the two.  source, path: the text, as data.source and data.path of train.py, all of
it; without, what the run kept from training.  out: where to write.  device: auto, cpu, gpu, mps.
precision: auto, fp32, bf16, fp16.  The others are explained under evaluation in conf/train.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longnet.config.arguments import parse_arguments, script
from longnet.config.bounds import BOUNDS
from longnet.config.errors import ConfigError
from longnet.config.evaluation import check_evaluation
from longnet.config.schema import MeasurementConfig
from longnet.config.typed import Problems

if TYPE_CHECKING:
    import torch

    from longnet.evaluation.results import Results
    from longnet.evaluation.text import Text


@dataclass
class Options(MeasurementConfig):
    run: str | None = None
    model: str | None = None
    source: str | None = None
    path: str | None = None
    out: str | None = None
    tasks: list[str] = field(default_factory=lambda: ["passkey"])
    device: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"


def check(options: Options) -> tuple[Path, Path]:
    """The checkpoint and where results go, after a look at everything that can be known without torch."""
    problems = Problems()
    if (options.run is None) == (options.model is None):
        problems.add("run", "run and model: expected one of the two, for example run=runs/tiny-dilated-stdlib")
    if options.model and options.source is None:
        problems.add("source", "source: has no value; give the text for model=..., for example source=text")
    if options.path and options.source is None:
        problems.add("path", f"path={options.path!r}: expected with it a source, for example source=text")
    if options.model and options.out is None:
        problems.add("out", "out: has no value; give the directory for the results of model=... by out=DIR")
    check_evaluation(options, problems)
    for name in ("max_tokens", "documents", "document_tokens", "samples", "batch_tokens"):
        value, bound = getattr(options, name), BOUNDS[f"evaluation.{name}"]
        if value is not None and not bound.admits(value):
            problems.add(name, f"{name}={value}: expected {bound}{bound.nearest(value)}")
    checkpoint = Path(options.model) if options.model else Path(options.run or "") / "model"
    if options.run and not Path(options.run).is_dir():
        problems.add("run", f"run={options.run!r}: no such directory; expected a run's, for example runs/NAME")
    elif options.run and not (checkpoint / "config.json").is_file():
        problems.add(
            "run", f"run={options.run!r}: it has no model yet; expected a finished run, the same command goes on"
        )
    elif options.model and not checkpoint.exists():
        problems.add("model", f"model={options.model!r}: no such file or directory; expected a checkpoint's")
    if problems.lines:
        raise ConfigError(problems.lines)
    return checkpoint, Path(options.out) if options.out else Path(options.run or "") / "evaluation"


def build_text(options: Options, tokenizer: str) -> Text:
    """What the run kept from training, or the text of ``source`` and ``path``."""
    import yaml

    from longnet.data import build_corpus
    from longnet.evaluation.text import read_text, validation_text

    if options.source:
        return read_text(options.source, options.path, tokenizer)
    config = yaml.safe_load((Path(options.run or "") / "config.yaml").read_text())
    left_out = ("batch_size", "num_workers")
    data = {name: value for name, value in config["data"].items() if name not in left_out}
    return validation_text(build_corpus(**data, seed=config["seed"]))


def choose_device(options: Options) -> tuple[torch.device, torch.dtype]:
    import torch

    kinds = {"gpu": "cuda", "cpu": "cpu", "mps": "mps", "auto": "cuda" if torch.cuda.is_available() else "cpu"}
    device = kinds[options.device]
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["device=gpu: torch sees no GPU; expected device=cpu or auto"])
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.device(device), dtypes.get(options.precision, torch.bfloat16 if device == "cuda" else torch.float32)


def show(results: Results) -> None:
    """The tables, as far as a screen has room for them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
        if rows:
            made = Table(*heads, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
            for row in rows:
                made.add_row(*row)
            Console().print(made)

    def interval(value: float, low: float, high: float, form: str = ".3f") -> str:
        return f"{value:{form}}" if low != low else f"{value:{form}} ({low:{form}} to {high:{form}})"

    table(
        "loss by context, on the same tokens",
        ["context", "nats a token (95 %)", "perplexity", "bits a byte", "gain (95 %)"],
        [
            [f"{r.context:,}", interval(r.loss, r.low, r.high), f"{r.perplexity:.3f}", f"{r.bits_per_byte:.3f}",
             interval(r.gain, r.gain_low, r.gain_high)]
            for r in results.contexts
        ],
    )  # fmt: skip
    table(
        "loss by position in whole documents",
        ["positions", "tokens", "nats a token (95 %)"],
        [
            [f"{r.begin:,} to {r.end - 1:,}", f"{r.tokens:,}", interval(r.loss, r.low, r.high)]
            for r in results.positions
        ],
    )
    table(
        "retrieval",
        ["task", "length", "depth", "nats a token", "tokens right", "preferred (95 %)", "generated"],
        [
            [r.task, f"{r.length:,}", f"{r.depth:g}", f"{r.loss:.3f}", f"{r.tokens_right:.0%}",
             interval(r.preferred, r.preferred_low, r.preferred_high, ".0%"), f"{r.generated:.0%}"]
            for r in results.retrieval
        ],
    )  # fmt: skip
    table(
        "needles at awkward places",
        ["place", "offset", "nats a token", "preferred (95 %)", "generated"],
        [
            [r.place, f"{r.offset:+}", f"{r.loss:.3f}",
             interval(r.preferred, r.preferred_low, r.preferred_high, ".0%"), f"{r.generated:.0%}"]
            for r in results.placements
        ],
    )  # fmt: skip


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    options = parse_arguments(Options, words, __doc__ or "")
    checkpoint, out = check(options)

    # torch and transformers take seconds to import: only for a command that can run.
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers import ByT5Tokenizer
    from transformers.utils import logging

    from longnet.evaluation.evaluate import plan
    from longnet.model.hf import load_checkpoint

    logging.disable_progress_bar()
    device, dtype = choose_device(options)
    loaded, tokenizer = load_checkpoint(checkpoint, dtype=dtype)
    model: Any = loaded.to(device).eval()  # type: ignore[arg-type]
    text = build_text(options, "bytes" if isinstance(tokenizer, ByT5Tokenizer) else str(checkpoint))
    evaluation = plan(model, text, options)
    columns = (TextColumn("evaluating"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        reading = bar.add_task("", total=evaluation.tokens)
        results = evaluation.run(lambda tokens: bar.advance(reading, tokens))
    results.facts.update(checkpoint=str(checkpoint), dtype=str(dtype))
    results.save(out)
    show(results)
    print(f"results  {out / 'results.json'}")


if __name__ == "__main__":
    main()
