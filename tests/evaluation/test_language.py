"""Losses by context and by position, against a plain forward pass over the same window."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from longnet.config.schema import MeasurementConfig
from longnet.data import ByteTokenizer
from longnet.evaluation.evaluate import plan
from longnet.evaluation.language import bucket_of, bucket_range, choose_blocks, loss_by_context, loss_by_position
from longnet.evaluation.losses import read_losses
from longnet.evaluation.text import Text
from tests.model.models import HYBRID, small_model

STREAM = np.random.default_rng(0).integers(3, 200, 700).astype(np.uint16)


@pytest.fixture(scope="module")
def model():
    return small_model(vocab_size=384, attention=HYBRID, num_hidden_layers=5)


def plain_losses(model, ids):
    """The losses of all tokens but the first, by one forward pass."""
    ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        return cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("piece", [7, 64, 1000])
def test_pieces_do_not_change_the_losses(model, piece, monkeypatch):
    monkeypatch.setattr("longnet.evaluation.losses.LOGITS", 384 * 5)
    ids = torch.from_numpy(STREAM[:131].astype(np.int64))[None]
    with torch.no_grad():
        parts = list(read_losses(model, ids, first=20, piece=piece))
    assert parts[0][0] == 20
    found = torch.cat([losses for _, losses, _ in parts], 1)[0]
    torch.testing.assert_close(found, plain_losses(model, STREAM[:131])[19:], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        likeliest = model(ids[:, :-1]).logits[0].argmax(-1)[19:] == ids[0, 20:]
    assert torch.cat([right for *_, right in parts], 1)[0].tolist() == likeliest.tolist()


def test_blocks_fit_every_window_and_never_overlap():
    for length in (129, 200, 1000):
        for most in (1, 100, 10_000):
            blocks = choose_blocks([(0, length - 1)], [32, 128], most)
            assert blocks.size == 16
            assert min(blocks.ends) > 128
            assert max(blocks.ends) <= length
            assert all(b - a >= 16 for a, b in zip(blocks.ends, blocks.ends[1:], strict=False))
            assert len(blocks.ends) * 16 <= max(most, 16)
    with pytest.raises(ValueError, match="need 129 tokens of text, there are 128; expected at most 127"):
        choose_blocks([(0, 127)], [32, 128], 100)


def test_windows_can_be_kept_within_documents():
    documents = [(0, 50), (50, 300), (300, 400), (400, 999)]
    blocks = choose_blocks(documents, [32, 128], 10_000)
    for end in blocks.ends:
        assert any(first <= end - 129 and end - 1 <= last for first, last in documents)
    # Every place that fits is taken: after 129 tokens of a document, every 16.
    assert len(blocks.ends) == ((251 - 129) // 16 + 1) + ((600 - 129) // 16 + 1)
    some = choose_blocks(documents, [32, 128], 64)
    assert len(some.ends) == 4
    assert set(some.ends) <= set(blocks.ends)
    assert (some.ends[0], some.ends[-1]) == (blocks.ends[0], blocks.ends[-1])


def test_every_context_is_measured_on_the_same_tokens(model):
    contexts = [24, 64, 160]
    blocks = choose_blocks([(0, len(STREAM) - 1)], contexts, 200)
    read = []
    rows = loss_by_context(
        model, STREAM, contexts, ByteTokenizer(), blocks=blocks, batch_tokens=150, advance=read.append
    )
    assert [row.context for row in rows] == contexts
    assert sum(read) == len(blocks.ends) * sum(contexts)
    for row in rows:
        expected = [
            plain_losses(model, STREAM[end - row.context - 1 : end])[-blocks.size :].sum().item() for end in blocks.ends
        ]
        assert row.tokens == len(blocks.ends) * blocks.size
        assert row.loss == pytest.approx(sum(expected) / row.tokens, rel=1e-4)
        assert row.low < row.loss < row.high
        assert row.perplexity == pytest.approx(math.exp(row.loss))
        # Every token of this stream is a byte.
        assert row.bits_per_byte == pytest.approx(row.loss / math.log(2), rel=1e-6)
        assert row.gain == pytest.approx(rows[0].loss - row.loss, abs=1e-6)
    assert (rows[0].gain, rows[0].gain_low, rows[0].gain_high) == (0, 0, 0)


def test_a_window_slides_beyond_the_trained_length(model):
    blocks = choose_blocks([(0, len(STREAM) - 1)], [32, 64, 256], 100)
    options = {"blocks": blocks, "batch_tokens": 512}
    slid = loss_by_context(model, STREAM, [32, 64, 256], ByteTokenizer(), trained=64, **options)
    assert [row.read for row in slid] == [32, 64, 64]
    assert slid[2].loss == slid[1].loss
    read = loss_by_context(model, STREAM, [32, 64, 256], ByteTokenizer(), **options)
    assert read[1] == slid[1]
    assert read[2].loss != slid[2].loss


def test_windows_that_all_slide_are_measured_on_what_is_read(model):
    """Blocks as long as a window that is not read whole would have targets that are never predicted."""
    options = MeasurementConfig(contexts=[256, 512], beyond="slide", documents=0, max_tokens=100)
    evaluation = plan(model, Text(ByteTokenizer(), STREAM, "random"), options)
    assert evaluation.blocks.size == model.config.max_position_embeddings // 2 == 32
    expected = torch.cat([plain_losses(model, STREAM[end - 65 : end])[-32:] for end in evaluation.blocks.ends])
    for row in evaluation.run().contexts:
        assert (row.read, row.tokens) == (64, len(expected))
        assert row.loss == pytest.approx(expected.mean().item(), rel=1e-4)
    whole = [(0, len(STREAM) - 1)]
    too_long = choose_blocks(whole, [256, 512], 100)
    with pytest.raises(ValueError, match="blocks of 128 tokens: expected at most the 64 that are read"):
        loss_by_context(model, STREAM, [256, 512], ByteTokenizer(), blocks=too_long, batch_tokens=512, trained=64)
    # Where a window is no longer than the trained context, it alone says how long blocks are.
    assert choose_blocks(whole, [64, 512], 100, trained=64) == choose_blocks(whole, [64, 512], 100)


def test_buckets_hold_every_position_once():
    positions = np.arange(5000)
    buckets = bucket_of(positions)
    for bucket in range(int(buckets.max()) + 1):
        begin, end = bucket_range(bucket)
        assert positions[buckets == bucket].tolist() == list(range(begin, min(end, 5000)))


def test_positions_add_up_to_all_tokens(model):
    documents = [STREAM[:300], STREAM[300:340], STREAM[340:470]]
    rows = loss_by_position(model, documents, batch_tokens=100)
    assert [(row.begin, row.end) for row in rows] == [(0, 64), (64, 128), (128, 256), (256, 512)]
    losses = [plain_losses(model, document) for document in documents]
    assert sum(row.tokens for row in rows) == sum(map(len, losses))
    for row in rows:
        # The first token is not predicted: loss number i is that of position i + 1.
        inside = torch.cat([each[max(row.begin - 1, 0) : row.end - 1] for each in losses])
        assert row.tokens == len(inside)
        assert row.loss == pytest.approx(inside.mean().item(), rel=1e-4)
    assert math.isnan(rows[-1].low)
    assert rows[1].low < rows[1].loss < rows[1].high
