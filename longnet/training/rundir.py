"""The directory of a run: what lies where, whose it is, and where a job that names it begins."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from longnet.config.schema import JobConfig
from longnet.parallel.checkpoints import is_sharded

# A resumed run must go on with the same model, data and optimiser; these say how it is run and watched, and may change.
# The trainer's part may, as long as a step stays the same rows (`_rows_per_step` sees to that), and so may the place of
# the data, as long as it is the same data (`check_same_data`).
_FREE = (
    "resume",
    "memory",
    "run",
    "logger",
    "callbacks",
    "evaluation",
    "strategy",
    "trainer",
    "data.path",
    "data.num_workers",
    "data.batch_size",
    "attention.backend",
)


class RunDirectory:
    """Paths and ownership of ``<root>/<name>``."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(root) / name
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.csv"
        self.checkpoints = self.path / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"
        self.best = self.checkpoints / "best.ckpt"
        self.model = self.path / "model"
        self.adapter = self.path / "adapter"
        self.plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"
        self.evaluation = self.path / "evaluation"
        self._lock: IO[str] | None = None
        self._created = False

    def check_writable(self) -> None:
        """Raises ``ValueError`` if the directory cannot be made or written, leaving nothing behind."""
        existing = self.path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        try:
            with tempfile.TemporaryDirectory(prefix=".longnet-", dir=existing):
                pass
        except OSError as error:
            raise ValueError(
                f"run directory {self.path} cannot be written ({error.strerror}): "
                f"set run.root to a directory you can write to, for example run.root={Path.home() / 'runs'}"
            ) from None

    def find_start(self, job: JobConfig) -> Path | None:
        """The checkpoint from which ``job`` goes on, or None to begin at step 0, after checking that it may.

        Raises:
            ValueError: if the directory is not this job's to use, or the checkpoint is not there or another's.
        """
        self._check_unlocked()
        checkpoint = self.checkpoint_for(job.resume)
        if job.resume not in ("auto", "never"):
            self._check_given(job, checkpoint)
        elif not self.config.exists():
            if any(not entry.name.startswith(".") for entry in self.path.glob("*")):
                raise ValueError(f"{self.path} holds files that are not a run's: choose another run.name or run.root")
        elif job.resume == "never":
            raise ValueError(
                f"{self.path} already holds a run and resume=never: choose another name, for example "
                f"run.name={self._free_name()}, or go on with it by resume=auto"
            )
        elif checkpoint is not None:
            self._check_same(job, self.config)
        return checkpoint

    def checkpoint_for(self, resume: str) -> Path | None:
        """The checkpoint that ``resume`` names here, unchecked: what processes other than the first one need."""
        if resume == "auto":
            return self.last if self.last.exists() else None
        if resume == "never":
            return None
        given = Path(resume)
        # A checkpoint that several processes wrote is a directory too.
        return RunDirectory(given.parent, given.name).last if given.is_dir() and not is_sharded(given) else given

    def check_same_data(self, checkpoint: Path, fingerprint: str) -> None:
        """Raises ``ValueError`` if the run of ``checkpoint`` was trained on other data than that of ``fingerprint``."""
        origin = _run_of(checkpoint)
        if not origin.environment.exists():
            return
        there = origin._sessions()[-1].get("data", {}).get("fingerprint", fingerprint)
        if there != fingerprint:
            raise ValueError(
                f"{origin.path} was trained on other data (fingerprint {there} there, {fingerprint} here): bring back "
                f"the files that data.source and data.path had, or choose another name, for example "
                f"run.name={self._free_name()}"
            )

    def open(self, job: JobConfig, environment: Mapping[str, Any]) -> None:
        """Takes the directory: makes it if need be, locks it, and writes what the run is and where it runs."""
        self._created = not self.path.exists()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._check_unlocked()
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.config.write_text(yaml.safe_dump(asdict(job), sort_keys=False))
        sessions = [*self._sessions(), dict(environment)]
        self.environment.write_text(json.dumps({"sessions": sessions}, indent=2) + "\n")

    def close(self, failed: bool = False) -> None:
        """Lets the directory go; one that this job made and that holds no logged step is removed if the job failed."""
        if self._lock is None:
            return
        self._lock.close()
        self._lock = None
        if failed and self._created and not self.metrics.exists() and not any(self.checkpoints.iterdir()):
            shutil.rmtree(self.path)

    def _check_given(self, job: JobConfig, checkpoint: Path | None) -> None:
        if checkpoint is None or not (checkpoint.is_file() or is_sharded(checkpoint)):
            raise ValueError(
                f"resume={job.resume}: there is no checkpoint; expected auto, never, a run's directory or one of its "
                f"checkpoints, for example {self.last}"
            )
        origin = _run_of(checkpoint)
        if self.config.exists() and origin.path.resolve() != self.path.resolve():
            raise ValueError(
                f"{self.path} already holds another run than resume={job.resume}: choose another name, "
                f"for example run.name={self._free_name()}"
            )
        if origin.config.exists():
            self._check_same(job, origin.config)

    def _check_same(self, job: JobConfig, config: Path) -> None:
        there, here = yaml.safe_load(config.read_text()), asdict(job)
        before, now = _flatten(there), _flatten(here)
        missing = object()
        differing = [
            f"  {key}: {_show(before.get(key, missing))} there, {_show(now.get(key, missing))} here"
            for key in sorted(before.keys() | now.keys())
            if before.get(key, missing) != now.get(key, missing) and not _is_free(key)
        ]
        rows = _rows_per_step(there), _rows_per_step(here)
        if rows[0] != rows[1]:
            differing.append(
                "  rows per step (data.batch_size x trainer.accumulate x processes that read different rows): "
                f"{rows[0]} there, {rows[1]} here"
            )
        if differing:
            raise ValueError(
                f"{config.parent} holds a run with another config:\n"
                + "\n".join(differing)
                + f"\nChoose another name, for example run.name={self._free_name()}, or give the run's own values."
            )

    def _sessions(self) -> list[dict[str, Any]]:
        return json.loads(self.environment.read_text())["sessions"] if self.environment.exists() else []

    def _check_unlocked(self) -> None:
        try:
            with (self.path / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is in use by a job that is still running: choose another name, "
                f"for example run.name={self._free_name()}"
            ) from None

    def _free_name(self) -> str:
        number = 2
        while self.path.with_name(f"{self.path.name}-{number}").exists():
            number += 1
        return f"{self.name}-{number}"


def _run_of(checkpoint: Path) -> RunDirectory:
    path = checkpoint.absolute().parent.parent
    return RunDirectory(path.parent, path.name)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _FREE)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _rows_per_step(config: Mapping[str, Any]) -> int:
    trainer = config["trainer"]
    # Runs of before sequence parallelism have no such key.
    sharing = config.get("strategy", {}).get("sequence_parallel_size", 1)
    readers = trainer["devices"] * trainer["num_nodes"] // sharing
    return config["data"]["batch_size"] * trainer["accumulate"] * readers


def _show(value: Any) -> str:
    return "not set" if type(value) is object else repr(value)
