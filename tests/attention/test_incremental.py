"""Reading piece by piece gives what the whole sequence at once gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from longnet.attention import DilationPattern, build_block
from longnet.attention import incremental as incremental_module
from longnet.attention import lanes as lanes_module
from longnet.attention.incremental import Turn, open_state, pattern_from
from longnet.attention.lanes import capacities_for, lanes_for

N = 70
LEVELS = {
    "nested": ((4, 8, 32), (1, 2, 4)),
    "crossing": ((5, 12, 64), (1, 3, 7)),
    "sparse": ((8, 16), (2, 8)),
    "endless": ((6, 2**40), (1, 5)),
}
HEADS = [(4, 4), (4, 2), (6, 2), (3, 1)]
OTHERS = [
    {"name": "dense"},
    {"name": "sliding_window", "window": 1},
    {"name": "sliding_window", "window": 9},
    {"name": "block_sparse", "block_size": 4, "local_blocks": 2, "stride": 3, "global_blocks": 1},
]


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stores to begin with, so that they must grow on the way."""
    monkeypatch.setattr(lanes_module, "FEWEST_SLOTS", 2)
    monkeypatch.setattr(incremental_module, "FEWEST_SLOTS", 2)


def draw(num_heads: int, num_kv_heads: int, batch: int = 2, length: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_heads)
    shapes = [(batch, length, heads, 4) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v


def turn_at(*begins: int, skips: list[int] | None = None) -> Turn:
    return Turn(list(begins), skips or [0] * len(begins), torch.tensor(begins))


def read_in_pieces(block: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Tensor:
    state, begin, outs = open_state(block), 0, []
    draw_size = random.Random(0)
    while begin < q.shape[1]:
        end = min(q.shape[1], begin + draw_size.choice(sizes))
        rows = (x[:, begin:end] for x in (q, k, v))
        outs.append(state.attend(*rows, turn_at(*[begin] * q.shape[0])))
        begin = end
    return torch.cat(outs, 1)


@pytest.mark.parametrize("sizes", [[1], [2, 5, 16, 33], [1, 1, 1, 8]], ids=["steps", "pieces", "both"])
@pytest.mark.parametrize("heads", ["all", "grouped"])
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS.keys())
def test_levels_equal_the_whole(levels: Any, heads: str, sizes: list[int]) -> None:
    for shift, (num_heads, num_kv_heads) in zip((0, 3, 11, 40), HEADS, strict=True):
        block = build_block({
            "name": "dilated", "segment_lengths": levels[0], "dilation_rates": levels[1], "heads": heads,
            "shift": shift,
        })  # fmt: skip
        q, k, v = draw(num_heads, num_kv_heads)
        result = read_in_pieces(block, q, k, v, sizes)
        torch.testing.assert_close(result, block(q, k, v), atol=1e-10, rtol=0)


@pytest.mark.parametrize("sizes", [[1], [2, 5, 16, 33], [1, 1, 1, 8]], ids=["steps", "pieces", "both"])
@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_other_blocks_equal_the_whole(spec: dict[str, Any], sizes: list[int]) -> None:
    block = build_block(spec)
    q, k, v = draw(4, 2)
    torch.testing.assert_close(read_in_pieces(block, q, k, v, sizes), block(q, k, v), atol=1e-10, rtol=0)


@pytest.mark.parametrize("spec", [{"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]}, OTHERS[2]])
def test_sequences_that_begin_later_are_as_if_alone(spec: dict[str, Any]) -> None:
    block = build_block(spec)
    q, k, v = draw(4, 2, batch=3)
    pads = [0, 13, 29]
    state = open_state(block)
    first = state.attend(q[:, :20], k[:, :20], v[:, :20], turn_at(0, 0, 0, skips=[0, 13, 20]))
    lengths = [20, 7, 0]
    second = state.attend(q[:, 20:40], k[:, 20:40], v[:, 20:40], turn_at(*lengths, skips=[0, 0, 9]))
    outs = [first, second]
    lengths = [40, 27, 11]
    for step in range(40, N):
        outs.append(state.attend(*(x[:, step : step + 1] for x in (q, k, v)), turn_at(*lengths)))
        lengths = [length + 1 for length in lengths]
    out = torch.cat(outs, 1)
    for row, pad in enumerate(pads):
        alone = block(*(x[row : row + 1, pad:] for x in (q, k, v)))
        torch.testing.assert_close(out[row : row + 1, pad:], alone, atol=1e-10, rtol=0)
        assert not out[row, :pad].any()


def test_half_precision_steps_are_near_the_whole() -> None:
    block = build_block({"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]})
    q, k, v = (x.bfloat16() for x in draw(4, 2))
    exact = block(q.double(), k.double(), v.double())
    for sizes in ([1], [5]):
        result = read_in_pieces(block, q, k, v, sizes)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), exact, atol=2e-2, rtol=2e-2)


def test_what_is_kept_is_bounded_by_the_pattern() -> None:
    pattern = DilationPattern((16, 64, 256), (1, 4, 16))
    for num_heads, num_kv_heads in HEADS:
        lanes = lanes_for(pattern, num_heads, num_kv_heads, capacities_for(pattern, 10**9))
        assert lanes.capacities == (16, 16, 16)
        for kv_head, of_head in enumerate(lanes.of_head):
            group = num_heads // num_kv_heads
            used = {(i, h % r) for i, r in enumerate((1, 4, 16)) for h in range(kv_head * group, (kv_head + 1) * group)}
            assert {lane[:2] for lane in of_head} == used
            assert len(of_head) == len(used)
            assert max(lane.start for lane in of_head) == 16 * (len(used) - 1)
        assert lanes.num_slots - 128 <= 16 * max(map(len, lanes.of_head)) < lanes.num_slots
    assert capacities_for(pattern, 5) == (8, 2, 2)


def test_a_billion_positions_in_nothing_is_different() -> None:
    block = build_block({"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4], "shift": 2})
    q, k, v = draw(4, 2)
    far = 32 * 10**8
    state = open_state(block)
    # Position far + shift stands where the shift stands in its segment, in a later segment than the first.
    near = open_state(build_block({"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]}))
    empty = (x[:, :1] for x in (q, k, v))
    near.attend(*empty, turn_at(0, 0))
    state.attend(*(x[:, :1] for x in (q, k, v)), turn_at(far - 2, far - 2))
    begin = 1
    for size in (1, 20, 1, 7):
        rows = [x[:, begin : begin + size] for x in (q, k, v)]
        expected = near.attend(*rows, turn_at(begin, begin))
        torch.testing.assert_close(state.attend(*rows, turn_at(far - 2 + begin, far - 2 + begin)), expected)
        begin += size


def test_aligned_pieces_share_one_pattern_without_a_shift() -> None:
    pattern = DilationPattern((16, 64, 2**20), (1, 4, 16))
    assert {pattern_from(pattern, begin, 64) for begin in range(0, 2**12, 64)} == {
        DilationPattern((16, 64, 64), (1, 4, 16))
    }
    assert pattern_from(pattern, 24, 64).shift == 24


def test_gradients_are_refused() -> None:
    block = build_block({"name": "dense"})
    q, k, v = draw(4, 2)
    with pytest.raises(ValueError, match=r"past_key_values .*torch.no_grad"):
        open_state(block).attend(q.requires_grad_(), k, v, turn_at(0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_pieces_and_steps_on_a_gpu(kv_heads: int) -> None:
    block = build_block({"name": "dilated", "segment_lengths": [256, 1024, 4096], "dilation_rates": [1, 4, 16]})
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 3000, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, kv_heads, kv_heads)
    )
    exact = block(q.double(), k.double(), v.double())
    state, outs, begin = open_state(block), [], 0
    for end in (512, 1024, 1300, 2900, *range(2901, 3001)):
        turn = Turn([begin], [0], torch.tensor([begin], device="cuda"))
        outs.append(state.attend(*(x[:, begin:end] for x in (q, k, v)), turn))
        begin = end
    torch.testing.assert_close(torch.cat(outs, 1).double(), exact, atol=2e-2, rtol=2e-2)
