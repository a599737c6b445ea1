"""Run directories as training and evaluation leave them, without either."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from longnet.config.schema import JobConfig
from longnet.evaluation.language import ContextRow, PositionRow
from longnet.evaluation.results import Results
from longnet.evaluation.retrieval import PlacementRow, RetrievalRow


def write_run(directory: Path, loss: float = 2.0, steps: int = 40, **changes: Any) -> Path:
    """A run whose loss falls towards ``loss``; ``changes`` are dotted keys of the config, `__` standing for the dot."""
    directory.mkdir(parents=True)
    config = asdict(JobConfig())
    config["data"]["context_length"] = 512
    config["attention"]["dilated"]["base"] = 64
    for key, value in changes.items():
        *path, name = key.split("__")
        place = config
        for part in path:
            place = place[part]
        place[name] = value
    config["run"]["name"] = directory.name
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    with (directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "tokens", "train/loss", "val/loss", "tokens_per_second", "mfu", "peak_memory_gib"])
        for step in range(1, steps + 1):
            value = loss + 3 / step
            writer.writerow([step, step * 512, value, value + 0.1 if step % 10 == 0 else "", 1000 + step, 0.4, 1.5])
    (directory / "sample.txt").write_text("def </script><b>not markup</b>\n")
    Results(
        {"step": steps},
        [ContextRow(c, c, 640, loss - i / 9, loss - i / 9 - 0.1, loss - i / 9 + 0.1, 7 - i, 2.5, i / 9, 0.0, 0.2)
         for i, c in enumerate((128, 512, 2048))],
        [PositionRow(0, 64, 63, loss + 1, float("nan"), float("nan"), 20.0),
         PositionRow(64, 128, 64, loss, 1.8, 2.2, 7.4)],
        [RetrievalRow(task, n, d, 20, 1.0, 0.9, 1.1, 0.7, 1 - d / 2, 0.2, 1.0, d, 0.0, 1.0)
         for task in ("passkey", "needle") for n in (256, 512) for d in (0.0, 0.5, 1.0)],
        [PlacementRow("needle", 512, "border of 64", o, 256 + o, 20, 1 + abs(o) / 9, *[float("nan")] * 3, 0.5)
         for o in (-8, 0, 8)],
    ).save(directory / "evaluation")  # fmt: skip
    return directory
