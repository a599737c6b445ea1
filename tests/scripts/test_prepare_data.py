"""`scripts/prepare_data.py` as a person meets it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def novels(tmp_path_factory) -> Path:
    """An archive in ELTeC's form."""
    root = tmp_path_factory.mktemp("novels")
    draw = random.Random(0)
    with tarfile.open(root / "eltec.tar.xz", "w:xz") as archive:
        for number in range(18400, 18414):
            path = root / f"ENG{number}_Author.txt"
            path.write_text(" ".join(draw.choices(["the", "novel", "goes", "on", "and", "on"], k=500)))
            archive.add(path, f"eltec/{path.name}")
    return root / "eltec.tar.xz"


def test_a_corpus_by_its_name_from_tokenizer_to_picture(novels, tmp_path):
    corpus = ("--corpus", "eltec-eng", "--path", novels)
    assert "ids" in run("tokenizer", *corpus, "--vocab-size", 300, "--output", tmp_path / "bpe")
    made = run("tokenize", *corpus, "--tokenizer", tmp_path / "bpe", "--output", tmp_path / "store", "--workers", 2)
    # 18403 and 18410 are divisible by 7.
    assert "train       12 documents" in made
    assert "validation  2 documents" in made
    assert f"python train.py data=prepared data.path={tmp_path / 'store'}" in made
    again = run("tokenize", *corpus, "--tokenizer", tmp_path / "bpe", "--output", tmp_path / "store")
    assert "store: unchanged" in again
    shown = run("inspect", tmp_path / "store", "--long", 100)
    assert "14 documents of at least 100 tokens hold 100.0% of all tokens" in shown
    assert (tmp_path / "store" / "lengths.png").exists()


def test_mistakes_are_told_in_a_line(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\nbroken\n')
    output = ("--output", tmp_path / "store")
    assert "--source is missing: expected one of stdlib" in run("tokenize", *output, code=1)
    broken = run("tokenize", "--source", "jsonl", "--path", tmp_path / "in", *output, code=1)
    assert "a.jsonl, line 2: is not JSON" in broken
    assert "Traceback" not in broken
    assert "is not a prepared store" in run("inspect", tmp_path, code=1)
    assert not (tmp_path / "store").exists()
    (tmp_path / "file").write_text("mine")
    for command in ("tokenizer", "tokenize"):
        told = run(command, "--source", "text", "--path", tmp_path / "in", "--output", tmp_path / "file", code=1)
        assert "file' is not a directory; choose another" in told
        assert "Traceback" not in told
