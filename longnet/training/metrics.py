"""`metrics.csv`: one row a logged step, the same columns from the first row to the last, whatever restarts between."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

COLUMNS = (
    "step",
    "tokens",
    "train/loss",
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "data_wait",
    "mfu",
    "peak_memory_gib",
    "seconds",
)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file, each with the values it has; a row cut off by a crash is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    rows = []
    for line in lines:
        if len(line) == len(header):
            rows.append({name: float(value) for name, value in zip(header, line, strict=True) if value})
    return rows


class MetricsFile(Logger):
    """Appends rows to a CSV file; a row outlives the process when the call returns, and the machine after `flush`.

    Args:
        path: the file.
        parts: the parts of a mixture, each of which has a column `rows/<part>` with the rows it has given so far.
        warn: told when the disk takes no more; rows wait until it does.
    """

    def __init__(self, path: Path, parts: Collection[str] = (), warn: Callable[[str], None] = print) -> None:
        super().__init__()
        self.path = path
        self._warn = warn
        self._waiting: list[dict[str, Any]] = []
        # A checkpoint that is written beside training flushes from its own thread.
        self._lock = threading.Lock()
        self.columns = (*COLUMNS, *(f"rows/{part}" for part in parts))

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Keeps the rows up to ``step``: what a run logged after the checkpoint it goes on from will come again."""
        if self.path.exists():
            self._write([row for row in read_metrics(self.path) if row["step"] <= step])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if unknown := set(metrics) - set(self.columns):
            raise ValueError(f"metrics {sorted(unknown)} have no column in {self.path.name}: add them to COLUMNS")
        with self._lock:
            self._waiting.append({**metrics, "step": step})
            try:
                self._append()
            except OSError as error:
                if len(self._waiting) == 1:
                    self._warn(f"WARNING: {self.path} cannot be written ({error.strerror}); rows wait until it can")

    def flush(self) -> None:
        """Puts every row on the disk, those that wait, too.

        Raises:
            OSError: if one of them cannot be.
        """
        with self._lock:
            if self._waiting:
                self._append()
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the run directory holds the config."""

    def _append(self) -> None:
        if not self.path.exists():
            self._write([])
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(map(self._cells, self._waiting))
        except OSError:
            # Half a row would spoil the next one, too.
            os.truncate(self.path, size)
            raise
        self._waiting = []

    def _write(self, rows: list[dict[str, float]]) -> None:
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(self._cells(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _cells(self, row: Mapping[str, Any]) -> list[str]:
        return ["" if row.get(name) is None else repr(_kind(name)(row[name])) for name in self.columns]


def _kind(column: str) -> type[int] | type[float]:
    return int if column in ("step", "tokens") or column.startswith("rows/") else float
