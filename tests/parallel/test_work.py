"""The work of all ranks together is that of one, level by level."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from longnet.attention import DilationPattern
from longnet.model import LongNetConfig
from longnet.parallel.communication import gradient_bytes
from longnet.parallel.rows import Layout
from longnet.parallel.work import attention_work
from longnet.planning import MemoryPlan, Workload, count_flops, predict_memory
from longnet.training.ranks import rank_layers, rank_workload

from ..attention.cases import patterns


@example(DilationPattern((2, 3), (2, 1)), 1, 2, 1, 1, False)
@given(patterns(), st.integers(1, 9), st.integers(1, 150), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_ranks_share_the_work(pattern, world, seq_len, kv_heads, group, causal):
    heads = kv_heads * group
    for form in ("gather", "ring", *(["ulysses"] if heads >= world else [])):
        ranks = [
            attention_work(form, Layout(pattern, rank, world, seq_len, heads, kv_heads), 8, causal=causal)
            for rank in range(world)
        ]
        for level, found in enumerate(zip(*ranks, strict=True)):
            work = sum(each.own + each.others for each in found)
            assert work == 4 * 8 * pattern.level_edges(level, seq_len, heads, causal)


def test_dense_halves_are_equal_work():
    layouts = [Layout(DilationPattern.dense(), rank, 4, 64, 2, 2) for rank in range(4)]
    work = [attention_work("ring", layout, 8) for layout in layouts]
    assert sum(level.own for (level,) in work) == DilationPattern.dense().flops(64, 2, 8)
    assert max(level.own for (level,) in work) <= 1.01 * min(level.own for (level,) in work)


def test_a_rank_of_a_thousand_costs_what_one_alone_does():
    """At a million tokens each, to a billion in all."""
    alone = billion = None
    for ranks in (1, 1024):
        context = 2**20 * ranks
        pattern = DilationPattern.geometric(context, base=2048)
        config = LongNetConfig(
            hidden_size=768, num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=context,
            attention=[{"name": "dilated", **pattern.to_config()}],
        )  # fmt: skip
        whole = Workload(config, context, 1, "bf16", "bf16", compiled=True)
        alone, billion = billion, rank_workload(whole, ranks, "gather")
    assert alone.share is None
    assert 1 < count_flops(billion).attention / count_flops(alone).attention < 1.01
    plan = MemoryPlan("selective")
    extra = predict_memory(billion, plan).device - predict_memory(alone, plan).device
    # A copy in float32 of the gradients of queries, keys and values, and less than half a GiB of other ranks' rows.
    assert extra <= 3 * 768 * 4 * 2**20 + 2**29
    received = sum(layer.received for layer in rank_layers(whole, 1024, "gather"))
    assert received < 12 * 10 * (2 + 2 + 4) * 2 * 2048 * 768


def test_gradients_of_the_weights():
    assert gradient_bytes(1000, 1) == 0
    assert gradient_bytes(1000, 8) == 2 * 4 * 875
    assert gradient_bytes(1000, 8, sharded=True) == 3 * 4 * 875
