"""Who holds what, without any process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.attention import DilationPattern
from longnet.parallel.mesh import MeshShape
from longnet.parallel.rows import Layout
from longnet.parallel.sharding import (
    lanes,
    local_pattern,
    own_pattern,
    shard,
    shard_length,
    shared_segments,
    spanning_levels,
    spread,
    streams,
)
from longnet.parallel.ulysses import HeadShard, head_plan
from longnet.parallel.zigzag import half_length, owner_of_half

from ..attention.cases import patterns

worlds = st.integers(1, 9)
lengths = st.integers(1, 150)


@given(worlds, lengths)
def test_shards_are_the_sequence_in_order(world, seq_len):
    shards = [shard(rank, world, seq_len) for rank in range(world)]
    assert [n for part in shards for n in range(part.begin, part.end)] == list(range(seq_len))
    assert all(part.length <= shard_length(world, seq_len) for part in shards)


@given(worlds, lengths)
def test_halves_hold_every_position_once(world, seq_len):
    assert sum(half_length(half, world, seq_len) for half in range(2 * world)) == seq_len
    assert sorted(owner_of_half(half, world) for half in range(2 * world)) == sorted([*range(world)] * 2)


@given(worlds, st.integers(0, 40))
def test_items_are_spread_evenly(world, number):
    shares = [spread(rank, world, number) for rank in range(world)]
    assert [item for share in shares for item in share] == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(patterns(), worlds, lengths, st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_own_shards_and_lanes_hold_every_edge_once(pattern, world, seq_len, kv_heads, group, causal):
    """Every (query, key) pair of the definition is computed by exactly one call, as often as the levels see it."""
    num_heads = kv_heads * group
    wanted = [pattern.counts(seq_len, head, num_heads, causal).tolist() for head in range(num_heads)]
    for rank in range(world):
        own = shard(rank, world, seq_len)
        if not own.length:
            continue
        for head in range(num_heads):
            inside = own_pattern(pattern, own).counts(own.length, head, num_heads, causal).tolist()
            for n, row in enumerate(inside):
                for m, count in enumerate(row):
                    wanted[head][own.begin + n][own.begin + m] -= count
        for rows in Layout(pattern, rank, world, seq_len, num_heads, kv_heads).segments():
            for source in rows.sources(causal):
                origin, rate = rows.segment.origin, rows.rate
                order = [(head, stream) for stream in rows.streams for head in stream.heads]
                for lane in lanes(rows.streams, origin, rate, rows.part(rank), rows.part(source)):
                    for head, stream in order[lane.heads]:
                        assert stream in rows.streams[lane.streams]
                        assert stream.kv_head == head // group
                        for i in range(lane.queries.begin, lane.queries.end):
                            for j in range(lane.keys.begin, lane.keys.end):
                                n, m = (origin + block * rate + stream.phase for block in (i, j))
                                wanted[head][n][m] -= 1
    assert not any(count for head in wanted for row in head for count in row)


def test_long_segments_are_shared_by_their_own_ranks_only():
    pattern = DilationPattern((16, 32, 64), (1, 2, 4))
    assert [(s.level, s.ranks) for s in shared_segments(pattern, 4, 64)] == [
        (1, range(2)), (1, range(2, 4)), (2, range(4)),
    ]  # fmt: skip


def test_aligned_shards_need_no_shift():
    pattern = DilationPattern((16, 32, 64), (1, 2, 4))
    assert own_pattern(pattern, shard(3, 4, 64)) == DilationPattern((16, 16, 16), (1, 2, 4))


def test_what_is_left_to_a_shard_does_not_depend_on_how_many_there_are():
    alone = DilationPattern.geometric(2**20, base=2048)
    for ranks in (8, 64, 1024):
        pattern = DilationPattern.geometric(ranks * 2**20, base=2048)
        assert local_pattern(pattern, ranks - 1, ranks, ranks * 2**20) == alone
    assert spanning_levels(pattern, 1023, 1024, 2**30) == frozenset(range(10, 20))
    # Dense, or by head groups, or without a level that would be left: as it is.
    for kept in (
        DilationPattern.dense(),
        DilationPattern((16, 64), (1, 4), heads="grouped"),
        DilationPattern((64,), (4,)),
    ):
        assert not spanning_levels(kept, 1, 4, 64)


@given(patterns(), worlds, st.integers(1, 4), st.integers(1, 4))
def test_heads_keep_their_phases_when_they_move(pattern, world, kv_heads, group):
    num_heads = kv_heads * group
    if num_heads < world:
        with pytest.raises(ValueError, match=f"the nearest sequence-parallel size that works is {num_heads}"):
            head_plan(0, world, num_heads, kv_heads)
        return
    for rank in range(world):
        plan = head_plan(rank, world, num_heads, kv_heads)
        local = HeadShard.of(pattern, plan.heads, num_heads)
        for place, head in enumerate(plan.heads):
            assert plan.kv_heads[place * len(plan.kv_heads) // len(plan.heads)] == head // group
            for level in range(len(pattern.levels)):
                assert local.phase(level, place, len(plan.heads)) == pattern.phase(level, head, num_heads)


def test_streams_share_keys_where_phases_agree():
    found = streams(DilationPattern((8,), (2,)), 0, num_heads=6, num_kv_heads=2)
    assert sorted((s.kv_head, s.phase, s.heads) for s in found) == [
        (0, 0, (0, 2)), (0, 1, (1,)), (1, 0, (4,)), (1, 1, (3, 5)),
    ]  # fmt: skip


def test_mesh_shapes():
    shape = MeshShape.of(8, 4)
    assert (shape, shape.data_rank(6), shape.sequence_rank(6)) == ((2, 4), 1, 2)
    with pytest.raises(ValueError, match="sequence=3: expected a divisor of the 8 processes; nearest: 2"):
        MeshShape.of(8, 3)
