"""The directory of a run: what lies where, whose it is, and where a job that names it begins."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from longnet.checkpoint import (
    DamagedError,
    best_of,
    bring_back,
    clean,
    newest_good,
    path_of,
    read_manifest,
    steps_of,
    verify,
)
from longnet.checkpoint.manifest import MANIFEST
from longnet.config.schema import JobConfig

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


class Origin(NamedTuple):
    """The checkpoint that a run was begun with or sent back to by ``resume``.

    Attributes:
        resume: the path that was given, made absolute; empty if none was.
        step: of the checkpoint.
        left: the run's own checkpoints of later steps at that time, by name, with the time of their last change. They
            are of a course that was left, until others take their names.
    """

    resume: str = ""
    step: int = 0
    left: Mapping[str, int] = {}


class RunDirectory:
    """Paths and ownership of ``<root>/<name>``."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(root) / name
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.csv"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.adapter = self.path / "adapter"
        self.plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"
        self.evaluation = self.path / "evaluation"
        # Hidden, since it may be there before the config, which is what makes a directory a run's.
        self.origin = self.path / ".origin.json"
        self._given: Path | None = None
        self._lock: IO[str] | None = None
        self._created = False

    @property
    def last(self) -> Path | None:
        """The newest checkpoint, unchecked."""
        left = self._left()
        return next((path for path in reversed(steps_of(self.checkpoints)) if path not in left), None)

    @property
    def best(self) -> Path | None:
        """The checkpoint of the lowest validation loss."""
        return best_of(steps_of(self.checkpoints))

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

    def find_start(self, job: JobConfig, warn: Callable[[str], None] = print) -> Path | None:
        """The checkpoint from which ``job`` goes on, or None to begin at step 0, after checking that it may.

        Args:
            job: the job.
            warn: told of newer checkpoints that are damaged.

        Raises:
            ValueError: if the directory is not this job's to use, or the checkpoint is not there, damaged or another's.
        """
        self._check_unlocked()
        checkpoint = self.checkpoint_for(job.resume, warn)
        if job.resume not in ("auto", "never"):
            self._check_given(job, checkpoint)
            self._given = checkpoint
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

    def checkpoint_for(self, resume: str, warn: Callable[[str], None] = lambda problem: None) -> Path | None:
        """The checkpoint that ``resume`` means here, every byte of it checked: the same for every process that asks.

        A path with which the run was begun means that beginning only until the run has a later checkpoint of its own.
        """
        bring_back(self.checkpoints)
        try:
            if resume == "never":
                return None
            if resume == "auto":
                return newest_good(self.checkpoints, warn, self._left())
            given = Path(resume)
            if self._began_with(resume):
                own = newest_good(self.checkpoints, warn, self._left())
                if own is not None and read_manifest(own).step > self._read_origin().step:
                    return own
            if not given.exists():
                return None
            if given.is_file() or (given / MANIFEST).exists():
                verify(given)
                return given
            return newest_good(given / self.checkpoints.name, warn)
        except DamagedError as error:
            raise ValueError(str(error)) from None

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
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_unlocked()
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._given is not None and not self._began_with(job.resume):
            self._write_origin(job.resume, read_manifest(self._given).step)
        # The config before the rest: it is what makes the directory a run's, should the job die here.
        _replace(self.config, yaml.safe_dump(asdict(job), sort_keys=False))
        sessions = [*self._sessions(), dict(environment)]
        _replace(self.environment, json.dumps({"sessions": sessions}, indent=2) + "\n")
        self.checkpoints.mkdir(exist_ok=True)
        clean(self.checkpoints)

    def close(self, failed: bool = False) -> None:
        """Lets the directory go; one that this job made and that holds no logged step is removed if the job failed."""
        if self._lock is None:
            return
        self._lock.close()
        self._lock = None
        if failed and self._created and not self.metrics.exists() and not self.last:
            shutil.rmtree(self.path)

    def _check_given(self, job: JobConfig, checkpoint: Path | None) -> None:
        if checkpoint is None:
            raise ValueError(
                f"resume={job.resume}: there is no checkpoint; expected auto, never, a run's directory or one of its "
                f"checkpoints, for example {self.last or path_of(self.checkpoints, 100)}"
            )
        origin = _run_of(checkpoint)
        elsewhere = origin.path.resolve() != self.path.resolve()
        if self.config.exists() and elsewhere and not self._began_with(job.resume):
            raise ValueError(
                f"{self.path} already holds another run than resume={job.resume}: choose another name, "
                f"for example run.name={self._free_name()}"
            )
        if origin.config.exists():
            self._check_same(job, origin.config)
        elif read_manifest(checkpoint).config != config_hash(job):
            raise ValueError(
                f"resume={job.resume} was saved by a run with another config, which is not beside it: give the "
                "model, data and optimiser that it had"
            )

    def _check_same(self, job: JobConfig, config: Path) -> None:
        here = asdict(job)
        try:
            there = yaml.safe_load(config.read_bytes())
            rows = _rows_per_step(there), _rows_per_step(here)
        except (yaml.YAMLError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{config} is damaged ({type(error).__name__}): bring it back from a copy, or remove it and give "
                f"resume={config.parent}"
            ) from None
        # A key that is newer than the run had its default.
        before, now = _flatten(asdict(JobConfig())) | _flatten(there), _flatten(here)
        missing = object()
        differing = [
            f"  {key}: {_show(before.get(key, missing))} there, {_show(now.get(key, missing))} here"
            for key in sorted(before.keys() | now.keys())
            if before.get(key, missing) != now.get(key, missing) and not _is_free(key)
        ]
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

    def _began_with(self, resume: str) -> bool:
        return self._read_origin().resume == str(Path(resume).resolve())

    def _left(self) -> set[Path]:
        """Checkpoints of a course that the run has left, unless there are no others."""
        left, paths = self._read_origin().left, steps_of(self.checkpoints)
        found = {path for path in paths if left.get(path.name) == path.stat().st_mtime_ns}
        return found if len(found) < len(paths) else set()

    def _write_origin(self, resume: str, step: int) -> None:
        later = [path for path in steps_of(self.checkpoints) if path.name > path_of(self.checkpoints, step).name]
        left = {path.name: path.stat().st_mtime_ns for path in later}
        _replace(self.origin, json.dumps(Origin(str(Path(resume).resolve()), step, left)._asdict(), indent=2) + "\n")

    def _read_origin(self) -> Origin:
        if not self.origin.exists():
            return Origin()
        try:
            found = Origin(**json.loads(self.origin.read_bytes()))
            return Origin(str(found.resume), int(found.step), dict(found.left))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{self.origin} is damaged ({type(error).__name__}): remove it") from None

    def _sessions(self) -> list[dict[str, Any]]:
        if not self.environment.exists():
            return []
        try:
            return list(json.loads(self.environment.read_bytes())["sessions"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.environment} is damaged ({type(error).__name__}): remove it") from None

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


def config_hash(job: JobConfig) -> str:
    """A hash of what a resumed run must keep. Keys at their defaults do not count, so that new ones change nothing."""
    default = _flatten(asdict(JobConfig()))
    fixed = {
        key: value
        for key, value in _flatten(asdict(job)).items()
        if not _is_free(key) and (key not in default or value != default[key])
    }
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    os.replace(draft, path)


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
