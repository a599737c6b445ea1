"""A job and everything that was built for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from longnet.config.schema import JobConfig

from .datamodule import TextDataModule
from .module import LongNetModule
from .placement import Placement
from .rundir import RunDirectory


@dataclass(frozen=True)
class Session:
    """What the parts of a job share.

    Attributes:
        job: the checked config.
        placement: where it runs.
        run: its directory.
        console: the screen; silent in all processes but the first.
        module: the model and how it is trained.
        data: the rows.
        checkpoint: where it goes on from; None to begin at step 0.
        start_step: the step of that checkpoint.
    """

    job: JobConfig
    placement: Placement
    run: RunDirectory
    console: Console
    module: LongNetModule
    data: TextDataModule
    checkpoint: Path | None
    start_step: int
