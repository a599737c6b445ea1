"""Runs side by side as one HTML file that needs nothing else: no network, no library, no other file."""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from longnet.config import resolve_attention
from longnet.config.schema import JobConfig
from longnet.config.typed import Problems, convert

from .compare import distinct_labels, read_run
from .results import TABLES
from .sight import draw_sight, receptive_field

PARTS = Path(__file__).parent
# Points of a curve: more than a screen has pixels would only make the file larger.
MOST_POINTS = 800
CURVES = ("train/loss", "val/loss", "val/bits_per_byte", "tokens_per_second", "mfu", "gradient_norm", "learning_rate")
SPEED = ("tokens_per_second", "mfu", "peak_memory_gib")
SAMPLE_CHARACTERS = 4000


def write_report(run_dirs: Sequence[Path], target: Path) -> None:
    """Writes the page.

    Args:
        run_dirs: directories of runs.
        target: the HTML file.

    Raises:
        ValueError: if a directory holds no run, or a file of it is not whole.
    """
    runs = [collect_run(directory) for directory in run_dirs]
    for run, label in zip(runs, distinct_labels(run_dirs), strict=True):
        run["label"] = label
    page = {"runs": runs, "differences": differing_keys([run["config"] for run in runs])}
    for run in runs:
        del run["config"]
    # "</" would end the script that holds the data.
    data = json.dumps(page, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    html = (PARTS / "report.html").read_text()
    for name, content in (
        ("STYLE", (PARTS / "report.css").read_text()),
        ("SCRIPT", (PARTS / "report.js").read_text()),
        ("DATA", data),
    ):
        html = html.replace(f"/*{name}*/", content)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html)


def collect_run(directory: Path) -> dict[str, Any]:
    """Everything the page shows of a run."""
    file = directory / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{directory} holds no run: expected the directory of one, with its config.yaml")
    config = _read(file, yaml.safe_load, ["data.context_length"], "the config of a run, as train.py writes it")
    metrics = read_run(directory)
    curves = {column: _thin(metrics.series(column)) for column in CURVES if metrics.values(column)}
    found = {column: metrics.values(column) for column in SPEED}
    speed = {name: statistics.median(values) for name, values in found.items() if values}
    if peaks := found["peak_memory_gib"]:
        speed["peak_memory_gib"] = max(peaks)
    sample = directory / "sample.txt"
    return {
        "name": directory.resolve().name,
        "config": _flatten(config),
        "context": config["data"]["context_length"],
        "curves": curves,
        "speed": speed,
        "evaluation": latest_evaluation(directory / "evaluation"),
        "pattern": _pattern(directory, config),
        "sample": sample.read_text(errors="replace")[:SAMPLE_CHARACTERS] if sample.is_file() else None,
    }


def latest_evaluation(directory: Path) -> dict[str, Any] | None:
    """What `scripts/evaluate.py` left there; else the last one of the training itself.

    Raises:
        ValueError: if it is not whole, or a step has no number.
    """
    own = directory / "results.json"
    files = [own] if own.is_file() else sorted(directory.glob("step-*/results.json"), key=_step)
    expected = f"what scripts/evaluate.py writes, with {', '.join(TABLES)}"
    return _read(files[-1], json.loads, TABLES, expected) if files else None


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys in which the runs differ, each with the values of all of them; names and places left out."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = []
    for key in keys:
        values = [_shown(config.get(key)) for config in configs]
        if len(set(values)) > 1 and not key.startswith("run."):
            rows.append({"key": key, "values": values})
    return rows


def _pattern(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    job = convert(JobConfig, dict(config), Problems())
    context, heads, layers = job.data.context_length, job.model.num_attention_heads, job.model.num_hidden_layers
    specs = resolve_attention(job)
    if job.model.pretrained:
        # The checkpoint has a shape of its own.
        saved = directory / "model/config.json"
        if not saved.is_file():
            return None
        sizes = ["num_attention_heads", "num_hidden_layers"]
        shape = _read(saved, json.loads, sizes, f"the config of a model, with {' and '.join(sizes)}")
        heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    # Most models repeat one or two blocks over their depth.
    sights = [draw_sight(spec, context, heads) for spec in _distinct(specs[:layers])[:4]]
    return {
        "context": context,
        "receptive": receptive_field(specs, layers, context, heads),
        "blocks": [
            {
                "text": sight.text,
                "cells": len(sight.union),
                "heads": [_bytes(head) for head in sight.heads[:16]],
                "union": _bytes(sight.union),
                "coverage": [list(point) for point in zip(sight.distances, sight.coverage, strict=True)],
                "keys": sight.keys,
            }
            for sight in sights
        ],
    }


def _read(file: Path, load: Callable[[str], Any], keys: Sequence[str], expected: str) -> dict[str, Any]:
    """What a file holds, if that is a mapping with these dotted keys."""
    try:
        found = load(file.read_text())
    except (ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict) or not _flatten(found).keys() >= set(keys):
        raise ValueError(f"{file} is not whole: expected {expected}")
    return found


def _step(file: Path) -> int:
    number = file.parent.name.removeprefix("step-")
    if not number.isdecimal():
        raise ValueError(f"{file.parent}: expected a number behind step-, for example step-100; rename it or move it")
    return int(number)


def _distinct(specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [spec for number, spec in enumerate(specs) if spec not in specs[:number]]


def _bytes(shares: np.ndarray) -> str:
    """Shares from 0 to 1 as bytes, in base64: a tenth of the same numbers written out."""
    return base64.b64encode(np.ceil(shares * 255).astype(np.uint8).tobytes()).decode()


def _thin(series: Sequence[tuple[float, float]]) -> list[list[float]]:
    step = max(1, math.ceil(len(series) / MOST_POINTS))
    kept = [*series[::step], *([series[-1]] if (len(series) - 1) % step else [])]
    return [[x, float(f"{y:.6g}")] for x, y in kept]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
