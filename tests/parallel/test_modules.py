"""The module faces: several ranks against one, and one rank against the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longnet.attention import DilatedAttention, DilationPattern, MultiheadDilatedAttention, build_block
from longnet.parallel import FORMS, RingDilatedAttention, RingMultiheadDilatedAttention, sequence_parallel_attention
from longnet.parallel.attention import ShardedOperator
from longnet.parallel.group import SequenceGroup

from .processes import run

LEVELS = ([8, 32, 48], [1, 2, 3])


def test_one_rank_is_the_plain_operator():
    q, k, v = (torch.randn(1, 32, 4, 8) for _ in range(3))
    plain = DilatedAttention(*LEVELS)(q, k, v, is_causal=True)
    assert torch.equal(RingDilatedAttention(*LEVELS, ring_size=1)(q, k, v, is_causal=True), plain)
    assert torch.equal(RingDilatedAttention(*LEVELS)(q, k, v, is_causal=True), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "rings"}, "form='rings': expected one of ['gather', 'ring', 'ulysses']; did you mean 'ring'?"),
        ({"seq_len": 40}, "seq_len=40: a single rank holds all positions; expected q's 32"),
    ],
)
def test_mistakes_are_explained(options, message):
    x = torch.randn(1, 32, 4, 8)
    with pytest.raises(ValueError) as error:
        sequence_parallel_attention(x, x, x, DilationPattern(*map(tuple, LEVELS)), **options)
    assert message in str(error.value)


def test_a_ring_needs_its_ranks():
    with pytest.raises(ValueError, match="ring_size=4: expected 1 or the group's 1 ranks"):
        RingDilatedAttention(*LEVELS, ring_size=4)


def multihead() -> tuple[Any, list[str]]:
    """The gradient of two sequences, from two groups of three ranks that work side by side."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group = groups[rank // 3]
    torch.manual_seed(0)
    x = torch.randn(2, 48, 32, dtype=torch.float64)[rank // 3][None]
    module = RingMultiheadDilatedAttention(32, 4, *LEVELS, group=group, form="gather", heads="grouped").double()
    out, _ = module(*[x[:, 16 * (rank % 3) :][:, :16]] * 3, is_causal=True)
    out.square().sum().backward()
    grad = module.in_proj_weight.grad
    dist.all_reduce(grad)

    q = torch.randn(1, 32, 2, 8)
    problems = []
    for options in ({"seq_len": 93}, {"cu_seqlens": torch.tensor([0, 32])}, {"backend": "reference"}):
        try:
            sequence_parallel_attention(q, q, q, DilationPattern((8,), (1,)), group=group, **options)
        except ValueError as error:
            problems.append(str(error))
    try:
        sequence_parallel_attention(q, q, q, DilationPattern((8,), (1,)), form="ulysses")
    except ValueError as error:
        problems.append(str(error))
    assert SequenceGroup.of(group) is SequenceGroup.of(group)
    parts = SequenceGroup.of(group)._parts
    assert list(parts) == [range(2), range(3)]
    assert parts[range(3)] is group
    return grad.numpy(), problems


def compiled_and_dropped() -> dict[str, Any]:
    """What a compiled block gives beside an eager one, and what dropout gives on this rank, twice from one seed."""
    group = SequenceGroup.of()
    block = build_block({"name": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, 2], "dropout": 0.5})
    found: dict[str, Any] = {}
    for form in FORMS:
        block.operator = ShardedOperator(form, group)
        torch.manual_seed(dist.get_rank())
        qkv = [torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3)]
        results = []
        for run_block in (block.eval(), torch.compile(block.eval(), fullgraph=True, backend="aot_eager")):
            out = run_block(*qkv)
            results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
        found[form] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        block.train()
        draws = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            draws.append(block(*qkv))
        (grad,) = torch.autograd.grad(draws[0].sum(), qkv[:1])
        same, other = torch.equal(draws[0], draws[1]), torch.equal(draws[0], draws[2])
        found[f"{form} dropout"] = same and not other and bool(grad.isfinite().all())
    assert copy.deepcopy(block).operator.group == group.name
    return found


def test_blocks_compile_as_one_graph_and_draw_dropout_from_the_seed():
    for found in run(2, compiled_and_dropped):
        assert all(found.values()), found


def test_sequences_side_by_side():
    torch.manual_seed(0)
    x = torch.randn(2, 48, 32, dtype=torch.float64)
    module = MultiheadDilatedAttention(32, 4, *LEVELS, heads="grouped").double()
    out, _ = module(x, x, x, is_causal=True)
    out.square().sum().backward()
    for grad, problems in run(6, multihead):
        assert torch.allclose(torch.from_numpy(grad), module.in_proj_weight.grad, rtol=1e-12, atol=1e-12)
        assert [problem.split(":")[0] for problem in problems] == [
            "seq_len=93",
            "cu_seqlens is given",
            "backend='reference'",
            "form='ulysses' gives each rank at least one of q's 2 heads, but the group has 6 ranks; the nearest "
            "sequence-parallel size that works is 2",
        ]
