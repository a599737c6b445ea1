"""The tiles hold every row of every level once, as views, and in few calls."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from longnet.attention import DilationPattern
from longnet.attention.tiles import causal_parts, chunks, shared_kv, tiles

from .cases import patterns


@given(patterns(max_length=60), st.integers(1, 130), st.integers(1, 4), st.integers(1, 5))
def test_tiles_hold_the_rows_of_each_level_once(
    pattern: DilationPattern, seq_len: int, num_kv_heads: int, group: int
) -> None:
    num_heads = num_kv_heads * group
    position = torch.arange(seq_len)[None, :, None, None].expand(1, seq_len, num_heads, 1)
    head = torch.arange(num_heads)[None, None, :, None].expand(1, seq_len, num_heads, 1)
    kv_position, kv_head = position[:, :, :num_kv_heads], head[:, :, :num_kv_heads]
    seen = torch.zeros(len(pattern.levels), seq_len, num_heads, dtype=torch.long)
    for tile in tiles(pattern, seq_len, num_heads, num_kv_heads):
        rows, heads = tile.queries(position), tile.queries(head)
        seen[tile.level, rows.flatten(), heads.flatten()] += 1
        # Each query head's keys are its own rows, read from the KV head that serves it.
        shared = len(tile.heads) // len(tile.kv_heads)
        key_rows, key_heads = tile.keys(kv_position), tile.keys(kv_head)
        repeat = rows.shape[3] // key_rows.shape[3]
        assert torch.equal(key_rows.repeat_interleave(repeat, 3), rows)
        assert torch.equal(key_heads.repeat_interleave(repeat, 3), heads // group)
        assert repeat == 1 or repeat == shared
    for level in range(len(pattern.levels)):
        for h in range(num_heads):
            expected = torch.zeros(seq_len, dtype=torch.long)
            expected[pattern.rows(level, h, seq_len, num_heads)] = 1
            assert torch.equal(seen[level, :, h], expected)


@given(st.integers(0, 7), st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_shared_kv_splits_evenly(first: int, count: int, step: int, group: int) -> None:
    heads = range(first, first + count * step, step)
    parts = list(shared_kv(heads, group))
    assert [head for part, _ in parts for head in part] == list(heads)
    for part, kv_heads in parts:
        each = len(part) // len(kv_heads)
        assert len(part) == each * len(kv_heads)
        assert [kv for kv in kv_heads for _ in range(each)] == [head // group for head in part]


def test_chunks_are_crossed_by_no_segment() -> None:
    nested = DilationPattern((4, 8, 16), (1, 2, 4))
    assert list(chunks(nested, [0, 40, 100], 20)) == [(0, 32), (32, 40), (40, 72), (72, 100)]
    for whole in (DilationPattern((6, 9), (1, 3)), DilationPattern((4, 8), (1, 2), shift=1), DilationPattern.dense()):
        assert list(chunks(whole, [0, 40, 100], 20)) == [(0, 40), (40, 100)]


def test_few_calls() -> None:
    """Phases or heads, whichever are fewer, become separate calls: at most sqrt(H) a level."""
    pattern = DilationPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
    found = tiles(pattern, 2**17, 16, 16)
    assert [sum(tile.level == level for tile in found) for level in range(5)] == [1, 2, 4, 2, 1]
    # Where r does not divide w, phases with a row more go apart from those with a row less.
    paper = tiles(DilationPattern.from_config("paper"), 2**17, 12, 12)
    assert [sum(tile.level == level for tile in paper) for level in range(5)] == [1, 2, 3, 4, 2]


@given(st.integers(1, 200), st.integers(1, 64))
def test_causal_parts_hold_each_pair_once(length: int, block: int) -> None:
    position = torch.arange(length)[None, :, None, None]
    pairs = torch.zeros(length, length, dtype=torch.long)
    first = True
    for part in causal_parts(length, block):
        assert first or not part.triangle, "triangles write rows first, so they must come first"
        first = first and part.triangle
        rows, keys = part.cut(position, part.queries)[0, ..., 0, 0], part.cut(position, part.keys)[0, ..., 0, 0]
        for r, k in zip(rows, keys, strict=True):
            visible = torch.ones(len(r), len(k), dtype=torch.long)
            pairs[r[:, None], k[None, :]] += visible.tril() if part.triangle else visible
    assert torch.equal(pairs, torch.ones_like(pairs).tril())
