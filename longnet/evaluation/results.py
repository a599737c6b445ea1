"""What an evaluation found, as files: `results.json` with everything, and a CSV file for each table."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .language import ContextRow, PositionRow
from .retrieval import PlacementRow, RetrievalRow

TABLES = ("contexts", "positions", "retrieval", "placements")


@dataclass(frozen=True)
class Results:
    """The tables of an evaluation, and what was evaluated.

    Attributes:
        facts: which model and data, and by which options.
        contexts: loss by the length of the window, on the same tokens.
        positions: loss by the position in whole documents.
        retrieval: tasks by length and depth.
        placements: needles around segment borders and in dilation phases.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    contexts: Sequence[ContextRow] = ()
    positions: Sequence[PositionRow] = ()
    retrieval: Sequence[RetrievalRow] = ()
    placements: Sequence[PlacementRow] = ()

    def save(self, directory: Path) -> None:
        """Writes the files; a reader never finds half of one. The table of a thing not measured is taken away."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            rows = [asdict(row) for row in getattr(self, name)]
            target = directory / f"{name}.csv"
            target.unlink(missing_ok=True)
            if rows:
                temporary = target.with_suffix(".tmp")
                with temporary.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                os.replace(temporary, target)
        temporary = directory / "results.tmp"
        # NaN is no JSON, and what reads this may be strict about it.
        temporary.write_text(json.dumps(_finite(asdict(self)), indent=1, allow_nan=False) + "\n")
        os.replace(temporary, directory / "results.json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
