"""Writing a checkpoint: beside its place, by all who hold a part of it, and renamed into place when it is whole."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .copies import HostCopies
from .files import Entry, sync_directory, write_json, write_tensors
from .manifest import Manifest
from .tree import flatten

STATE = "state.json"
TENSORS = "tensors-{rank:05d}.safetensors"
# The header entry of a file of tensors: the whole shape of each, and where in it the part lies.
PARTS = "parts"
RECEIPT = "receipt-{rank:05d}.json"
# What is being written, what is being removed, and what is whole and waits until its successor has the name.
TEMPORARY, OLD, ASIDE = ".tmp-", ".old-", ".aside-"


@dataclass(frozen=True)
class Facts:
    """What the manifest is to say besides the files."""

    step: int
    config: str = ""
    validation_loss: float | None = None


def _alone(ok: bool) -> bool:
    return ok


@dataclass(frozen=True)
class Processes:
    """Who writes a checkpoint together.

    Attributes:
        rank: of this process.
        world: how many there are; 1 if the state is whole in this one.
        agree: whether all say yes, asked of all at once.
    """

    rank: int = 0
    world: int = 1
    agree: Callable[[bool], bool] = _alone


ALONE = Processes()


class Writer:
    """One process's share in writing a checkpoint to ``target``.

    Everything is taken out of ``state`` when it is built, so training may go on while it writes.

    Args:
        target: the directory to be.
        state: nested dicts and lists of tensors and plain values; sharded tensors are written by all processes.
        facts: for the manifest.
        processes: who writes.
        session: names the attempt, the same on all processes, so that none takes an older one's files for this one's.
        copies: takes copies of the tensors, where these will change while this writes.
        beforehand: called by the first process before the checkpoint gets its name, which it does not if this fails.
    """

    def __init__(
        self,
        target: Path,
        state: Mapping[str, Any],
        facts: Facts,
        processes: Processes = ALONE,
        session: str = "0",
        copies: HostCopies | None = None,
        beforehand: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.folder = target.with_name(f"{TEMPORARY}{target.name}-{session}")
        self.facts = facts
        self.rank, self.world, self._agree = processes.rank, processes.world, processes.agree
        self._beforehand = beforehand
        self._tree, tensors = flatten(state)
        parts = {name: part for name, x in tensors.items() if (part := _part(x, self.rank)) is not None}
        self._tensors = {name: x.detach() for name, (x, *_) in parts.items()}
        self._copies = copies
        if copies is not None:
            self._tensors = copies.take(self._tensors)
        self._places = {name: {"shape": shape, "offset": offset} for name, (_, shape, offset) in parts.items()}

    def write(self) -> None:
        """Writes the checkpoint together with the other processes, each of which calls this.

        Raises:
            OSError: in every process, if one of them could not write; nothing is left of the attempt.
        """
        error: OSError | None = None
        try:
            self.write_part()
        except OSError as caught:
            error = caught
        if self._agree(error is None) and self.rank == 0:
            try:
                self.publish()
            except OSError as caught:
                error = caught
        if not self._agree(error is None):
            self.abandon()
            raise error or OSError("another process could not write its part")

    def write_apart(self, timeout: float) -> None:
        """As `write`, where the processes cannot talk to each other, as from a thread beside training."""
        try:
            self.write_part()
            if self.rank == 0:
                self.wait_for_parts(timeout)
                self.publish()
        except OSError:
            self.abandon()
            raise

    def write_part(self) -> None:
        """Writes what this process holds, and a receipt for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._copies is not None:
            self._copies.wait()
        tensors = TENSORS.format(rank=self.rank)
        written = {tensors: write_tensors(self.folder / tensors, self._tensors, {PARTS: json.dumps(self._places)})}
        if self.rank == 0:
            written[STATE] = write_json(self.folder / STATE, self._tree)
        receipt = self.folder / RECEIPT.format(rank=self.rank)
        draft = receipt.with_suffix(".draft")
        write_json(draft, {name: asdict(entry) for name, entry in written.items()})
        draft.replace(receipt)

    def wait_for_parts(self, timeout: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Waits for the receipts of all processes, where these cannot talk to each other meanwhile."""
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in range(self.world) if not (self.folder / RECEIPT.format(rank=rank)).exists()]:
            if time.monotonic() > deadline:
                raise OSError(f"process(es) {missing} did not write their part of {self.target} in {timeout:g} seconds")
            sleep(0.05)

    def publish(self) -> None:
        """Puts the finished checkpoint in its place; for the first process, when all parts are there."""
        self._beforehand()
        files: dict[str, Entry] = {}
        for rank in range(self.world):
            receipt = self.folder / RECEIPT.format(rank=rank)
            files |= {name: Entry(**entry) for name, entry in json.loads(receipt.read_text()).items()}
            receipt.unlink()
        Manifest(self.facts.step, self.facts.config, self.facts.validation_loss, files).write(self.folder)
        sync_directory(self.folder)
        self._take_name()

    def _take_name(self) -> None:
        """Renames the directory into place; a checkpoint of the same step is removed only when this one is there."""
        aside = None
        if self.target.exists():
            aside = self.target.rename(self.target.with_name(f"{ASIDE}{self.target.name}-{time.monotonic_ns()}"))
        try:
            self.folder.rename(self.target)
        except OSError:
            if aside is not None:
                aside.rename(self.target)
            raise
        sync_directory(self.target.parent)
        if aside is not None:
            discard(aside)

    def abandon(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def discard(path: Path) -> None:
    """Removes a checkpoint, which is never seen half removed."""
    if path.exists():
        doomed = path.with_name(f"{OLD}{path.name}-{time.monotonic_ns()}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _part(tensor: Tensor, rank: int) -> tuple[Tensor, list[int], list[int]] | None:
    """What this process writes of a tensor: the part, the whole's shape, and where in the whole the part begins."""
    if not isinstance(tensor, DTensor):
        return None if rank else (tensor, list(tensor.shape), [0] * tensor.dim())
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return None if rank else (tensor.to_local(), list(tensor.shape), [0] * tensor.dim())
    local = tensor.to_local()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (local, list(tensor.shape), list(offset)) if local.numel() else None
