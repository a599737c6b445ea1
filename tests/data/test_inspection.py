from __future__ import annotations

import numpy as np

from longnet.data import SourceSpec, TokenStore, tokenize
from longnet.data.inspection import describe, document_lengths, plot_lengths


def test_lengths_and_shares_are_counted(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, length in enumerate([1, 3, 10, 100, 1000, 1]):
        (texts / f"{number}.txt").write_bytes(b"x" * length)
    tokenize(SourceSpec("text", str(texts), validation_every=5), "bytes", tmp_path / "store")
    store = TokenStore(tmp_path / "store")
    assert sorted(document_lengths(store)) == [1, 1, 3, 10, 100, 1000]
    text = describe(store, long=100)
    assert "2 documents of at least 100 tokens hold 98.7% of all tokens" in text
    assert "median 6, mean 186, longest 1,000 tokens" in text
    counts = [int(line[24:35]) for line in text.splitlines() if " - " in line]
    assert sum(counts) == 6
    plot_lengths(store, tmp_path / "lengths.png", long=100)
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    assert np.diff(store.borders("train")).min() >= 1
