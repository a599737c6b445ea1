import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longnet.attention import NAMED_PATTERNS, DilationPattern

from .cases import patterns


def brute_force_sees(pattern: DilationPattern, n: int, m: int, head: int, num_heads: int, causal: bool) -> int:
    """The definition once more, in plain integers."""
    total = 0
    for level, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        if pattern.heads == "all":
            phase = head % r
        else:
            levels = len(pattern.segment_lengths)
            sizes = [num_heads // levels + (i < num_heads % levels) for i in range(levels)]
            if not sum(sizes[:level]) <= head < sum(sizes[: level + 1]):
                continue
            phase = level % r
        a, b = n + pattern.shift, m + pattern.shift
        total += a // w == b // w and (a % w) % r == phase == (b % w) % r and (m <= n or not causal)
    return total


@given(patterns(max_length=12), st.integers(1, 25), st.integers(1, 6), st.booleans(), st.data())
def test_counts_are_the_definition(
    pattern: DilationPattern, seq_len: int, num_heads: int, causal: bool, data: st.DataObject
) -> None:
    head = data.draw(st.integers(0, num_heads - 1))
    counts = pattern.counts(seq_len, head, num_heads, causal)
    expected = [
        [brute_force_sees(pattern, n, m, head, num_heads, causal) for m in range(seq_len)] for n in range(seq_len)
    ]
    assert counts.tolist() == expected


@given(patterns(max_length=40), st.integers(1, 90), st.integers(1, 9), st.booleans())
def test_edges_keys_and_coverage_agree_with_counts(
    pattern: DilationPattern, seq_len: int, num_heads: int, causal: bool
) -> None:
    counts = [pattern.counts(seq_len, head, num_heads, causal) for head in range(num_heads)]
    assert pattern.edges(seq_len, num_heads, causal) == sum(int(c.sum()) for c in counts)
    assert pattern.flops(seq_len, num_heads, 8, causal) == 32 * pattern.edges(seq_len, num_heads, causal)
    for head, count in enumerate(counts):
        assert int(count.sum(1).max()) <= pattern.max_keys(seq_len) <= pattern.max_keys()
        assert pattern.uncovered(seq_len, head, num_heads) == int((count.sum(1) == 0).sum())
        rows = torch.zeros(seq_len, dtype=torch.long)
        for level in range(len(pattern.levels)):
            rows[pattern.rows(level, head, seq_len, num_heads)] += 1
        assert torch.equal(rows, count.diagonal())


def test_max_keys_is_reached() -> None:
    pattern = DilationPattern((4, 8), (1, 2))
    assert int(pattern.counts(8, 1, 2).sum(1).max()) == pattern.max_keys() == 8


def test_the_paper() -> None:
    paper = DilationPattern.from_config("paper")
    assert paper.segment_lengths == (2048, 4096, 8192, 16384, 32768)
    assert paper.dilation_rates == (1, 2, 4, 6, 12)
    # Where r divides w and H, a level costs what the design says, up to the diagonal.
    one_level = DilationPattern((4096,), (4,))
    assert one_level.flops(16384, 16, 64, causal=False) == 4 * (16384 // 4096) * (4096 // 4) ** 2 * 64 * 16


def test_geometric() -> None:
    assert DilationPattern.geometric(8192) == DilationPattern((2048, 4096, 8192), (1, 2, 4))
    assert DilationPattern.geometric(8193).reach == 16384
    assert DilationPattern.geometric(1000) == DilationPattern((2048,), (1,))
    assert DilationPattern.geometric(64, base=4, ratio=4, heads="grouped") == DilationPattern(
        (4, 16, 64), (1, 4, 16), heads="grouped"
    )


def test_order_of_levels_means_nothing() -> None:
    ordered, shuffled = DilationPattern((4, 8, 16), (1, 2, 4)), DilationPattern([16, 4, 8], [4, 1, 2])
    assert ordered == shuffled
    assert hash(ordered) == hash(shuffled)
    assert len({ordered, shuffled}) == 1


@given(patterns())
def test_round_trips(pattern: DilationPattern) -> None:
    assert DilationPattern.from_config(json.loads(json.dumps(pattern.to_config()))) == pattern
    assert DilationPattern.from_config(pattern) is pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert eval(repr(pattern)) == pattern


def test_is_immutable_and_printable() -> None:
    pattern = DilationPattern((4, 8), (1, 2), shift=2)
    with pytest.raises(AttributeError):
        pattern.shift = 3  # type: ignore[misc]
    assert str(pattern) == "w/r 4/1, 8/2 (all heads, shift 2)"
    assert str(NAMED_PATTERNS["dense"]) == "w/r all/1 (all heads)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 8), (1,)), "segment_lengths=(4, 8) has 2 levels but dilation_rates=(1,) has 1"),
        (((), ()), "segment_lengths is empty"),
        (((0,), (1,)), "segment_lengths has 0: expected an integer >= 1; the nearest is 1"),
        (((4,), (-2,)), "dilation_rates has -2"),
        (((4,), (5,)), "dilation_rates[0]=5 is larger than segment_lengths[0]=4: expected r <= w; the nearest rate"),
        (((4.5,), (1,)), "segment_lengths has 4.5: expected an integer; the nearest is 4"),
        ((("4",), (1,)), "segment_lengths has '4': expected an integer"),
        (((True,), (1,)), "segment_lengths has True: expected an integer"),
        ((4, 1), "segment_lengths=4: expected a list of integers"),
        (("4", "1"), "segment_lengths='4': expected a list of integers"),
        (((4,), (1,), "group"), "heads='group': expected one of ('all', 'grouped'); did you mean 'grouped'?"),
        (((4,), (1,), "all", -1), "shift has -1: expected an integer >= 0; the nearest is 0"),
        (((4,), (1,), "all", 0.5), "shift has 0.5"),
    ],
)
def test_bad_patterns_say_what_is_wrong(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError) as error:
        DilationPattern(*arguments)
    assert message in str(error.value)


def test_bad_configs_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="expected one of .*'paper'"):
        DilationPattern.from_config("papper")
    with pytest.raises(ValueError, match="unknown keys .*'segments'"):
        DilationPattern.from_config({"segments": [4], "dilation_rates": [1], "segment_lengths": [4]})
    with pytest.raises(ValueError, match="lacks .*dilation_rates"):
        DilationPattern.from_config({"segment_lengths": [4]})
    with pytest.raises(ValueError, match="ratio has 1"):
        DilationPattern.geometric(100, ratio=1)
    with pytest.raises(ValueError, match="head=4"):
        DilationPattern.dense().phase(0, 4, 4)
