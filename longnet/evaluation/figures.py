"""Evaluations of several models as one picture: a panel for each thing that was measured, a line for each model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .intervals import share

Rows = Sequence[Mapping[str, Any]]
Point = tuple[float, float, float, float]

# Positions of less text than this tell more about that text than about the model.
FEWEST_TOKENS = 500


def context_points(rows: Rows) -> list[Point]:
    """Perplexity by the length of the window: (context, perplexity, low, high)."""
    return [(row["context"], *_perplexities(row)) for row in rows if row["loss"] is not None]


def position_points(rows: Rows) -> list[Point]:
    """Perplexity by position: (middle of the range, perplexity, low, high)."""
    kept = [row for row in rows if row["tokens"] >= FEWEST_TOKENS and row["loss"] is not None]
    return [(math.sqrt(max(row["begin"], 1) * row["end"]), *_perplexities(row)) for row in kept]


def distance_points(rows: Rows, task: str) -> list[Point]:
    """How often a task's answer is preferred by how far back it lies, in prompts of all lengths: (tokens, share, ...).

    Of copies, whose answers are too long to be compared, it is the share of their tokens that are the likeliest.
    """
    if task == "copy":
        return sorted((row["length"] / 2, *[row["tokens_right"]] * 3) for row in rows if row["task"] == task)
    found: dict[float, tuple[float, int]] = {}
    for row in rows:
        if row["task"] == task and row["preferred"] is not None:
            distance = row["length"] * (1 - row["depth"])
            right, samples = found.get(distance, (0.0, 0))
            found[distance] = right + row["preferred"] * row["samples"], samples + row["samples"]
    shares = {distance: share(round(right), samples) for distance, (right, samples) in found.items()}
    return sorted((distance, pooled.value, pooled.low, pooled.high) for distance, pooled in shares.items())


def _perplexities(row: Mapping[str, Any]) -> tuple[float, float, float]:
    # Of a single document or block there is no interval, and a model that is far off is off the paper.
    loss, low, high = (min(row["loss"] if row[name] is None else row[name], 700) for name in ("loss", "low", "high"))
    return math.exp(loss), math.exp(low), math.exp(high)


def draw_evaluations(evaluations: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """Writes the picture of evaluations (label to the content of its results.json).

    Raises:
        ValueError: if none of them holds anything that can be drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def lines(table: str, points: Callable[[Rows], list[Point]]) -> dict[str, list[Point]]:
        return {label: points(results[table]) for label, results in evaluations.items()}

    panels = [
        ("window, same targets", "perplexity", lines("contexts", context_points)),
        ("position in the document", "perplexity", lines("positions", position_points)),
    ]
    tasks = dict.fromkeys(row["task"] for results in evaluations.values() for row in results["retrieval"])
    for task in tasks:
        by_distance = lines("retrieval", partial(distance_points, task=task))
        panels.append((f"{task}: tokens back", "tokens right" if task == "copy" else "answer preferred", by_distance))
    panels = [panel for panel in panels if any(len(points) > 1 for points in panel[2].values())]
    if not panels:
        raise ValueError(f"nothing to draw in {', '.join(evaluations)}: expected windows, documents or tasks")
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (along, upwards, drawn) in zip(grid, panels, strict=True):
        for number, (label, points) in enumerate(drawn.items()):
            x, y, low, high = zip(*points, strict=True) if points else ((), (), (), ())
            (line,) = axes.plot(x, y, marker="o", markersize=3, label=label, color=f"C{number}")
            # Bands that lie on each other stay as light as few of them.
            axes.fill_between(x, low, high, alpha=0.3 / (1 + len(drawn)), color=line.get_color(), linewidth=0)
        axes.set_xlabel(along)
        axes.set_ylabel(upwards)
        axes.grid(alpha=0.3)
        if upwards == "perplexity":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            # Logarithmic down to the nearest, and what stands right before the question at 0.
            nearest = min((point[0] for points in drawn.values() for point in points if point[0]), default=1)
            axes.set_xscale("symlog", base=2, linthresh=nearest)
            axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    grid[0].legend(fontsize="small")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)


def _short(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
