"""The checkpoints of a run: which there are, which to keep, which to go on from."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from .manifest import DamagedError, read_manifest, verify
from .writing import ASIDE, OLD, TEMPORARY, discard

_STEP = re.compile(r"step-(\d+)")
_ASIDE = re.compile(re.escape(ASIDE) + r"(step-\d+)-\d+")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def steps_of(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = [(int(match[1]), path) for path in entries if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """The checkpoint of the lowest validation loss; of equal ones the first. One that is not finite is no loss."""
    losses = []
    for path in checkpoints:
        try:
            loss = read_manifest(path).validation_loss
        except DamagedError:
            continue
        if loss is not None and math.isfinite(loss):
            losses.append((loss, path))
    return min(losses, key=lambda item: item[0], default=(0.0, None))[1]


def newest_good(folder: Path, warn: Callable[[str], None], left: Collection[Path] = ()) -> Path | None:
    """The newest checkpoint of which every byte is as it was saved; None if there is no checkpoint at all.

    Args:
        folder: where they lie.
        warn: told of every newer one that cannot be used, and why.
        left: those that are not looked at.

    Raises:
        DamagedError: if there are checkpoints and none of them is good.
    """
    damaged = []
    for path in reversed([path for path in steps_of(folder) if path not in left]):
        try:
            verify(path)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            warn(f"WARNING: {problem}; falling back to {path}")
        return path
    if damaged:
        raise DamagedError(
            "no checkpoint is left to go on from: " + "; ".join(damaged) + ". Bring one back from a copy, or choose "
            "another run.name to begin anew"
        )
    return None


def prune(folder: Path, saved: Path, keep: int) -> None:
    """Removes all but the last ``keep`` checkpoints, the best, and the one just saved, which is known to be good.

    Those of later steps were of a course that was left: the run went back to before them.
    """
    before = [path for path in steps_of(folder) if path.name <= saved.name]
    kept = {saved, best_of(before), *before[-keep:]}
    for path in steps_of(folder):
        if path not in kept:
            discard(path)


def bring_back(folder: Path) -> None:
    """Gives a checkpoint its name again that was being replaced when the job was killed, before there was another."""
    for path in folder.glob(f"{ASIDE}*"):
        if match := _ASIDE.fullmatch(path.name):
            # Another process may have been first, and a name that is taken is its successor's.
            with suppress(OSError):
                path.rename(folder / match[1])


def clean(folder: Path) -> None:
    """Removes what a job that was killed while saving or removing left behind."""
    bring_back(folder)
    for prefix in (TEMPORARY, OLD, ASIDE):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
