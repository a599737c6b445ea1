"""What can be known about the machine and the launcher without importing torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# GPUs that are not numbered nvidia devices: AMD, Windows through WSL, Jetson.
OTHER_GPU_DEVICES = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")


@dataclass(frozen=True)
class Machine:
    """Facts a config is checked against.

    Attributes:
        gpus: number of GPUs a job could use; None where only torch can tell.
        world_size: processes that a launcher (torchrun) has started; None when this process was started by hand.
        local_world_size: those of them on this machine; None where the launcher does not say.
        multi_node_launcher: whether something that starts processes on several machines started this one.
    """

    gpus: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    multi_node_launcher: bool = False


def inspect_machine(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> Machine:
    """Looks at the environment's variables and at the device files."""
    world_size = _number(environ.get("WORLD_SIZE"))
    return Machine(
        gpus=_count_gpus(environ, dev),
        world_size=world_size,
        local_world_size=_number(environ.get("LOCAL_WORLD_SIZE")),
        multi_node_launcher=world_size is not None or "SLURM_JOB_ID" in environ or "NODE_RANK" in environ,
    )


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process that speaks for all of a job's processes."""
    return all(environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _count_gpus(environ: Mapping[str, str], dev: Path) -> int | None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    if not sys.platform.startswith("linux") or any(Path(path).exists() for path in OTHER_GPU_DEVICES):
        return None
    nvidia = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in dev.glob("nvidia*"))
    # A list of names or of slices of a GPU is torch's to read.
    return nvidia if nvidia == 0 or visible is None else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
