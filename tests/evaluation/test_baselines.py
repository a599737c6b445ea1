from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.evaluation.baselines import measure_baselines, unigram_bits_per_byte


def test_unigram_is_the_entropy_where_training_is_large_and_alike():
    train = b"aaab" * 100_000
    expected = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert unigram_bits_per_byte(b"abaa" * 25, train) == pytest.approx(expected, abs=2e-3)


@given(st.binary(min_size=1, max_size=200), st.binary(min_size=1, max_size=200))
def test_unigram_is_the_code_length_under_training_counts(validation, train):
    bits = sum(-math.log2((train.count(byte) + 1) / (len(train) + 256)) for byte in validation)
    assert unigram_bits_per_byte(validation, train) == pytest.approx(bits / len(validation))


def test_unigram_does_not_look_at_validation_frequencies():
    assert unigram_bits_per_byte(b"z" * 1000, b"a" * 1000) > 8


def test_xz_is_given_the_validation_bytes_alone_unless_asked():
    noise = random.Random(0).randbytes(20_000)
    alone = measure_baselines(noise, noise)
    assert alone.num_bytes == 20_000
    assert 8 <= alone.xz < 8.1
    assert alone.xz_given_train is None
    # The same bytes seen before cost a small part of that.
    assert 0 <= measure_baselines(noise, noise, given_train=True).xz_given_train < 0.5


def test_order_is_what_xz_has_over_unigram():
    text = b"the quick brown fox jumps over the lazy dog\n" * 200
    measured = measure_baselines(text, text)
    assert measured.xz < 0.5 < 4 < measured.unigram


@pytest.mark.parametrize(("validation", "train"), [(b"", b"x"), (b"x", b"")])
def test_nothing_to_measure_is_refused(validation, train):
    with pytest.raises(ValueError, match="must not be empty"):
        measure_baselines(validation, train)
