"""What a run ran on: versions, commit, hardware and command line, so that a result can be traced."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_SECRET = re.compile(r"(?i)^([^=]*(?:api_?key|access_?key|_token|secret|password|credentials?)=).+", re.DOTALL)
_ADDRESS = re.compile(r"(://)[^/@\s]+@")
_PACKAGES = (
    "longnet",
    "torch",
    "lightning",
    "transformers",
    "hydra-core",
    "numpy",
    "einops",
    "safetensors",
    "triton",
    "wandb",
)


def describe_environment() -> dict[str, Any]:
    """Everything worth knowing about this process, ready for JSON."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [sys.executable, *command_line()],
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git(),
    }


def command_line() -> list[str]:
    """The words of the command, without what is a secret by its name or stands before the @ of an address."""
    return [_ADDRESS.sub(r"\1***@", _SECRET.sub(r"\1***", word)) for word in sys.argv]


def cpu_model() -> str:
    """The processor's name as people know it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
