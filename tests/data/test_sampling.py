from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from longnet.data.packing import IGNORE_INDEX, PackedRows
from longnet.data.sampling import EpochOrder, MixtureOrder, StepBatchSampler, batch_rows, validation_batches

num_rows = st.integers(1, 40)
batch_sizes = st.integers(1, 12)
worlds = st.integers(1, 5)
seeds = st.integers(0, 2**64)


def take(sampler: StepBatchSampler, steps: int) -> list[list[int]]:
    return list(islice(sampler, steps))


@given(num_rows, batch_sizes, worlds, seeds, st.booleans())
def test_each_epoch_sees_every_row_once(rows, batch_size, world, seed, shuffle):
    steps = -(-3 * rows // (batch_size * world))
    ranks = [
        take(StepBatchSampler(rows, batch_size, rank, world, seed, shuffle=shuffle), steps) for rank in range(world)
    ]
    sequence = [row for step in range(steps) for rank in range(world) for row in ranks[rank][step]]
    for epoch in range(3):
        assert sorted(sequence[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(num_rows, batch_sizes, worlds, seeds, st.integers(0, 10**12))
def test_one_rank_with_the_whole_batch_reads_what_many_read_together(rows, batch_size, world, seed, step):
    together = batch_rows(step, order=EpochOrder(rows, seed), batch_size=batch_size * world)
    apart = [
        batch_rows(step, order=EpochOrder(rows, seed), batch_size=batch_size, data_rank=rank, data_world=world)
        for rank in range(world)
    ]
    assert [row for batch in apart for row in batch] == together
    # Accumulation likewise: smaller micro-batches, as many more of them.
    accumulated = [
        batch_rows(step * world + i, order=EpochOrder(rows, seed), batch_size=batch_size) for i in range(world)
    ]
    assert [row for batch in accumulated for row in batch] == together


@given(num_rows, batch_sizes, worlds, seeds, st.integers(0, 30), st.data())
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(rows, batch_size, world, seed, start, data):
    rank = data.draw(st.integers(0, world - 1))
    whole = take(StepBatchSampler(rows, batch_size, rank, world, seed), start + 5)
    assert take(StepBatchSampler(rows, batch_size, rank, world, seed, start_step=start), 5) == whole[start:]


def test_shuffling_depends_on_seed_and_epoch():
    def epoch(number: int, seed: int) -> list[int]:
        return batch_rows(number, order=EpochOrder(50, seed), batch_size=50)

    orders = {tuple(epoch(number, seed)) for number in range(4) for seed in range(4)}
    assert len(orders) == 16
    assert batch_rows(1, order=EpochOrder(50, shuffle=False), batch_size=50) == list(range(50))


def test_the_order_is_pinned():
    # A run must resume on the same rows after an upgrade of anything.
    assert batch_rows(0, order=EpochOrder(10, 1337), batch_size=10) == [7, 0, 4, 6, 8, 2, 9, 3, 5, 1]
    assert batch_rows(1, order=EpochOrder(10, 1337), batch_size=10) == [4, 5, 8, 3, 1, 9, 0, 2, 7, 6]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_do_not_change_the_batches(num_workers):
    dataset = PackedRows(np.arange(61, dtype=np.uint16), 4)
    sampler = StepBatchSampler(len(dataset), 4, data_rank=1, data_world=2, seed=3, start_step=5)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    expected = [
        torch.stack([dataset[row]["input_ids"] for row in rows])
        for rows in (
            batch_rows(step, order=EpochOrder(15, 3), batch_size=4, data_rank=1, data_world=2) for step in range(5, 12)
        )
    ]
    for batch, wanted in zip(islice(loader, 7), expected, strict=True):
        assert torch.equal(batch["input_ids"], wanted)


@given(num_rows, batch_sizes, worlds)
def test_validation_covers_every_token_once_in_equally_many_batches(rows, batch_size, world):
    stream = np.arange(rows * 3 + 1, dtype=np.uint16)
    dataset = PackedRows(stream, 3).padded_to_multiple(batch_size * world)
    ranks = [validation_batches(len(dataset), batch_size, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) == batch_size for batches in ranks for batch in batches)
    counts = Counter(
        label for batches in ranks for batch in batches for row in batch for label in dataset[row]["labels"].tolist()
    )
    counts.pop(IGNORE_INDEX, None)
    assert counts == Counter(stream[1:].tolist())


@given(st.integers(1, 6), batch_sizes, worlds, st.data())
def test_a_limit_on_validation_batches_leaves_the_first_rows(steps, batch_size, world, data):
    limit = data.draw(st.integers(1, steps))
    ranks = [validation_batches(steps * batch_size * world, batch_size, rank, world)[:limit] for rank in range(world)]
    read = sorted(row for batches in ranks for batch in batches for row in batch)
    assert read == list(range(limit * batch_size * world))


def test_uneven_validation_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"num_rows=10 .*padded_to_multiple\(4\), which has 12"):
        validation_batches(10, 2, 0, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"data_world": 0},
        {"data_rank": 2},
        {"data_rank": -1},
        {"seed": -1},
        {"start_step": -1},
    ],
)
def test_impossible_arguments_are_named(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        StepBatchSampler(**{"order": 10, "batch_size": 2, "data_world": 2, **arguments})


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="num_rows=0"):
        StepBatchSampler(0, 1)


parts = st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 1.0)), min_size=1, max_size=4)


@settings(max_examples=20)
@given(parts, seeds)
def test_a_mixture_has_its_weights_exactly_over_each_thousand(parts, seed):
    sizes, weights = zip(*parts, strict=True)
    order = MixtureOrder(sizes, weights, seed)
    rows = np.array(order.take(0, 2000))
    part = np.searchsorted(np.cumsum(sizes), rows, side="right")
    for period in range(2):
        counts = np.bincount(part[period * 1000 : (period + 1) * 1000], minlength=len(sizes))
        assert counts.sum() == 1000
        assert all(abs(count - 1000 * weight / sum(weights)) < 1 for count, weight in zip(counts, weights, strict=True))
        shares = np.cumsum(part[period * 1000 : (period + 1) * 1000] == 0) - np.arange(1, 1001) * counts[0] / 1000
        assert abs(shares).max() < len(sizes) + 1
    for places in (0, 1, 777, 1000, 1999, 2000):
        assert order.counts(places) == np.bincount(part[:places], minlength=len(sizes)).tolist()


@settings(max_examples=20)
@given(parts, seeds)
def test_a_part_of_a_mixture_comes_in_epochs_of_its_own(parts, seed):
    sizes, weights = zip(*parts, strict=True)
    rows = np.array(MixtureOrder(sizes, weights, seed).take(0, 1500))
    part = np.searchsorted(np.cumsum(sizes), rows, side="right")
    for number, size in enumerate(sizes):
        own = rows[part == number] - sum(sizes[:number])
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


@settings(max_examples=20)
@given(parts, seeds, st.integers(0, 3000), st.integers(0, 20))
def test_a_mixture_can_be_entered_anywhere(parts, seed, start, count):
    order = MixtureOrder(*zip(*parts, strict=True), seed)
    assert order.take(start, count) == order.take(0, start + count)[start:]


def test_a_weight_that_would_never_come_is_refused():
    with pytest.raises(ValueError, match=r"0.0001 is less than a thousandth of their sum; expected at least 0.001"):
        MixtureOrder((5, 5), (1.0, 0.0001))


def test_the_order_of_a_mixture_is_pinned():
    assert MixtureOrder((5, 9), (0.5, 0.5), 1337).take(0, 8) == [0, 12, 3, 10, 9, 1, 6, 2]
