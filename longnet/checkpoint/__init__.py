"""Checkpoints: directories of safetensors and JSON, whole or absent, checked before they are used."""

from .copies import HostCopies
from .folder import best_of, bring_back, clean, newest_good, path_of, prune, steps_of
from .manifest import DamagedError, Manifest, read_manifest, verify
from .reading import Contents, read_whole
from .writing import Facts, Processes, Writer

__all__ = [
    "Contents",
    "DamagedError",
    "Facts",
    "HostCopies",
    "Manifest",
    "Processes",
    "Writer",
    "best_of",
    "bring_back",
    "clean",
    "newest_good",
    "path_of",
    "prune",
    "read_manifest",
    "read_whole",
    "steps_of",
    "verify",
]
