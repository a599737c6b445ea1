"""Runs side by side: a table and a picture of what each of them reached, made from their `metrics.csv`."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """The logged rows of a run; a row holds only the values that were logged at its step."""

    name: str
    rows: list[dict[str, float]]

    def values(self, column: str) -> list[float]:
        return [row[column] for row in self.rows if column in row]

    def series(self, column: str, against: str = "step") -> Series:
        return [(row[against], row[column]) for row in self.rows if column in row and against in row]


# Heading, column of metrics.csv, which of its values, and how it is written. The speed is a median because the first
# steps compile and warm up.
COLUMNS: tuple[tuple[str, str, Callable[[list[float]], float], str], ...] = (
    ("steps", "step", max, "{:.0f}"),
    ("train loss", "train/loss", lambda values: values[-1], "{:.4f}"),
    ("val loss", "val/loss", lambda values: values[-1], "{:.4f}"),
    ("val bits/byte", "val/bits_per_byte", lambda values: values[-1], "{:.4f}"),
    ("tokens/s", "tokens_per_second", statistics.median, "{:,.0f}"),
    ("peak GiB", "peak_memory_gib", max, "{:.2f}"),
    ("seconds", "seconds", max, "{:.0f}"),
)
RANKED_BY = "val bits/byte"


def compare(run_dirs: Sequence[str | Path], out_dir: str | Path) -> list[dict[str, float]]:
    """Writes `comparison.csv` and `comparison.png` into `out_dir` and prints the table.

    Args:
        run_dirs: directories of runs; one without metrics is listed with nothing beside its name.
        out_dir: where to write, made if need be.

    Returns:
        For each run, in the order given, the figures of the table that it has.
    """
    runs = [read_run(Path(directory)) for directory in run_dirs]
    figures = [
        {head: pick(run.values(column)) for head, column, pick, _ in COLUMNS if run.values(column)} for run in runs
    ]
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(out / "comparison.csv", runs, figures)
    labels = distinct_parts([run.name for run in runs])
    _draw(out / "comparison.png", runs, labels)
    _print_table(labels, figures)
    print(f"The table and the curves: {out / 'comparison.csv'}, {out / 'comparison.png'}")
    return figures


def read_run(directory: Path) -> Run:
    """The metrics of a run; without rows where it has none. A row that a crash cut short is left out."""
    file = directory / "metrics.csv"
    if not file.is_file():
        return Run(directory.name, [])
    with file.open(newline="") as lines:
        header, *cells = list(csv.reader(lines)) or [[]]
    rows = []
    for line in cells:
        if len(line) == len(header):
            numbers = {name: _number(cell) for name, cell in zip(header, line, strict=True)}
            rows.append({name: number for name, number in numbers.items() if number is not None})
    return Run(directory.name, rows)


def distinct_parts(names: Sequence[str]) -> list[str]:
    """The names without the parts, between dashes, with which all of them begin and end."""
    parts = [name.split("-") for name in names]
    shortest = min(map(len, parts), default=0)
    if len(names) < 2 or shortest == 0:
        return list(names)
    first = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    last = next((i for i in range(shortest - first) if len({p[-1 - i] for p in parts}) > 1), shortest - first - 1)
    return ["-".join(p[first : len(p) - last]) for p in parts]


def distinct_labels(directories: Sequence[Path]) -> list[str]:
    """What tells directories apart in their names; where that is nothing, their whole paths."""
    names = distinct_parts([directory.resolve().name for directory in directories])
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _write_csv(path: Path, runs: Sequence[Run], figures: Sequence[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *(head for head, *_ in COLUMNS)])
        for run, found in zip(runs, figures, strict=True):
            writer.writerow([run.name, *(found.get(head, "") for head, *_ in COLUMNS)])


def _print_table(labels: Sequence[str], figures: Sequence[dict[str, float]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [column for column in COLUMNS if any(column[0] in found for found in figures)]
    best = min((found[RANKED_BY] for found in figures if RANKED_BY in found), default=None)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for head, *_ in shown:
        # A heading may break; a number may not.
        table.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
    for label, found in zip(labels, figures, strict=True):
        cells = [form.format(found[head]) if head in found else "-" for head, _, _, form in shown]
        table.add_row(label, *cells, style="bold" if best is not None and found.get(RANKED_BY) == best else "")
    Console().print(table)


def _draw(path: Path, runs: Sequence[Run], labels: Sequence[str]) -> None:
    # The figure's own class, rather than pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure

    against = "tokens" if all("tokens" in run.rows[-1] for run in runs if run.rows) else "step"
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, title, marker in (
        (panels[0], "train/loss", "training loss (nats a token)", ""),
        (panels[1], "val/bits_per_byte", "validation (bits a byte)", "o"),
    ):
        for run, label in zip(runs, labels, strict=True):
            if series := run.series(column, against):
                axes.plot(*zip(*series, strict=True), marker=marker, markersize=4, linewidth=1.4, label=label)
        axes.set_title(title)
        axes.set_xlabel(against)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
