from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from longnet.data.hf_tokenizer import train_bpe

WORDS = ["alpha", "beta", "gamma", "delta", "return", "import", "self", "naïve", "straße", "12", "34.5", "\n\n", "\t"]


def some_text(seed: int, words: int) -> bytes:
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=words)).encode()


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on the words of the tests."""
    directory = tmp_path_factory.mktemp("tokenizers") / "small-bpe"
    train_bpe([some_text(number, 200) for number in range(20)], vocab_size=400).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files of different lengths, some of which fall to validation."""
    root = tmp_path_factory.mktemp("books")
    for number in range(20):
        (root / f"book{number:02}.txt").write_bytes(some_text(number, 20 + 30 * (number % 5)))
    return root


@pytest.fixture(scope="session")
def other_eos(bpe: Path) -> Path:
    """The same tokenizer.json, with another eos: as base and instruct models of one family have it."""
    directory = bpe.with_name("other-eos")
    shutil.copytree(bpe, directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|pad|>"}))
    return directory
