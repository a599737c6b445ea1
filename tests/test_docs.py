"""What the documentation shows works: its Python runs, its training commands compose."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
COMMANDS = sorted({
    match.split("#")[0].strip()
    for page in PAGES
    for match in re.findall(r"^(?:torchrun --nproc-per-node \d+|python) (train\.py.*)$", page.read_text(), re.MULTILINE)
    if "--cfg" not in match
})  # fmt: skip


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_runs(snippet: str) -> None:
    exec(snippet, {})


@pytest.mark.parametrize("command", COMMANDS)
def test_training_commands_compose(command: str) -> None:
    words = [word for word in shlex.split(command) if word != "-m"]
    # A sweep's list is one option of a single job here, and a GPU's job is only composed.
    words = [re.sub(r"=([\w-]+),[\w,-]+$", r"=\1", word) for word in words]
    done = subprocess.run(
        [sys.executable, *words, "--cfg", "job"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_there_is_something_to_test() -> None:
    assert len(SNIPPETS) >= 3
    assert len(COMMANDS) >= 4


def test_pictures_and_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
