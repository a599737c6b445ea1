"""Messages and bytes, counted where torch.distributed is called, against the formulas."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from longnet.attention import DilationPattern
from longnet.parallel import FORMS, attention_traffic, sequence_parallel_attention
from longnet.parallel import group as communication
from longnet.parallel.communication import Traffic
from longnet.parallel.rows import Layout

from .processes import run

HEAD_DIM = 8
GEOMETRIC = DilationPattern((16, 32, 64, 128), (1, 2, 4, 8))
# (pattern, sequence length, heads, KV heads, causal)
CASES = {
    "aligned": (GEOMETRIC, 128, 8, 8, True),
    "grouped queries, both ways": (GEOMETRIC, 128, 8, 2, False),
    "cut by borders": (DilationPattern((10, 37, 70), (1, 3, 6), shift=3), 113, 8, 4, True),
    "dense": (DilationPattern.dense(), 75, 8, 2, True),
}


def count_received(names: list[str]) -> dict[tuple[str, str], list[Traffic]]:
    """What this rank received, forward and backward."""
    counted: Counter[str] = Counter()

    def receive(messages: int, elements: int, x: torch.Tensor) -> None:
        counted["messages"] += messages
        counted["received"] += elements * x.element_size()

    def count_gather(whole, part, **options):
        receive(1, whole.numel() - part.numel(), part)
        return all_gather(whole, part, **options)

    def count_scatter(part, whole, **options):
        receive(1, whole.numel() - part.numel(), part)
        return reduce_scatter(part, whole, **options)

    def count_all_to_all(got, sent, received, given, **options):
        receive(1, sum(received) - received[dist.get_rank()], got)
        return all_to_all(got, sent, received, given, **options)

    def count_exchange(operations):
        for operation in operations:
            if operation.op is dist.irecv:
                receive(1, operation.tensor.numel(), operation.tensor)
        return exchange(operations)

    all_gather, reduce_scatter = communication._all_gather, communication._reduce_scatter
    all_to_all, exchange = dist.all_to_all_single, dist.batch_isend_irecv
    communication._all_gather, communication._reduce_scatter = count_gather, count_scatter
    dist.all_to_all_single, dist.batch_isend_irecv = count_all_to_all, count_exchange

    results = {}
    for name in names:
        pattern, seq_len, heads, kv_heads, causal = CASES[name]
        length = -(-seq_len // dist.get_world_size())
        for form in FORMS:
            q, k, v = (torch.randn(1, length, n, HEAD_DIM, requires_grad=True) for n in (heads, kv_heads, kv_heads))
            passes = []
            counted.clear()
            out = sequence_parallel_attention(q, k, v, pattern, form=form, causal=causal, seq_len=seq_len)
            passes.append(Traffic(**counted))
            counted.clear()
            out.sum().backward()
            passes.append(Traffic(**counted))
            results[name, form] = passes
    return results


@pytest.mark.parametrize("world", [4])
def test_traffic_is_what_the_formulas_say(world):
    for rank, counted in enumerate(run(world, count_received, list(CASES))):
        for (name, form), passes in counted.items():
            pattern, seq_len, heads, kv_heads, causal = CASES[name]
            layout = Layout(pattern, rank, world, seq_len, heads, kv_heads)
            levels = attention_traffic(form, layout, HEAD_DIM, element_size=4, causal=causal)
            expected = [
                sum((level.forward for level in levels), Traffic()),
                sum((level.backward for level in levels), Traffic()),
            ]
            assert passes == expected, (name, form, rank)


def test_gather_stays_below_the_bound_of_the_design():
    """2 b (w / r) H D per level, however long the sequence and however many the ranks."""
    for world, seq_len in ((4, 2**14), (64, 2**18), (1024, 2**22)):
        pattern = DilationPattern.geometric(seq_len, base=2048)
        for rank in (0, world - 1):
            layout = Layout(pattern, rank, world, seq_len, 16, 16)
            for level in attention_traffic("gather", layout, head_dim=64):
                width, rate = pattern.levels[level.level]
                assert 0 < level.forward.received < 2 * 2 * (width // rate) * 16 * 64


def test_one_rank_receives_nothing():
    for form in FORMS:
        assert attention_traffic(form, Layout(GEOMETRIC, 0, 1, 128, 8, 8), HEAD_DIM) == []
