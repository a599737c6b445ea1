"""The three forms on 2, 4 and 8 processes against the definition on one, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from longnet.attention import DilationPattern, reference_attention
from longnet.parallel import FORMS, sequence_parallel_attention
from longnet.parallel.sharding import shard, shard_length

from ..attention.cases import Case, worst_error
from .processes import run

DENSE = DilationPattern.dense()


def case(pattern: DilationPattern, seq_len: int, heads: tuple[int, int] = (8, 8), causal: bool = True, batch: int = 1):
    return Case(pattern, batch, seq_len, *heads, 8, causal, None, seed=seq_len + heads[1])


CASES = {
    "aligned": case(DilationPattern((16, 32, 64, 128), (1, 2, 4, 8)), 128),
    "aligned batch": case(DilationPattern((16, 32, 64, 128), (1, 2, 4, 8)), 128, batch=2),
    "all to all": case(DilationPattern((16, 32, 64, 128), (1, 2, 4, 8)), 128, causal=False),
    "grouped queries": case(DilationPattern((16, 64, 128), (1, 4, 3)), 128, heads=(12, 3)),
    "one KV head": case(DilationPattern((16, 64), (1, 3)), 96, heads=(8, 1), causal=False),
    "phases cut by borders": case(DilationPattern((24, 48, 96), (3, 5, 7)), 104),
    "segments cut by borders": case(DilationPattern((10, 37, 70), (1, 3, 6)), 112, heads=(9, 3)),
    "segments cut, both ways": case(DilationPattern((10, 37, 70), (2, 3, 6)), 112, heads=(8, 4), causal=False),
    "shifted": case(DilationPattern((16, 40, 64), (1, 3, 4), shift=23), 96, heads=(8, 2), batch=2),
    "head groups": case(DilationPattern((16, 40, 96), (1, 3, 4), heads="grouped"), 96, heads=(8, 2)),
    "head groups, shifted": case(
        DilationPattern((11, 40, 96), (2, 3, 4), heads="grouped", shift=5), 96, heads=(10, 5), causal=False
    ),
    "padded": case(DilationPattern((16, 40, 128), (1, 3, 4)), 101, heads=(8, 4), batch=2),
    "padded, both ways": case(DilationPattern((16, 40, 128), (1, 3, 4)), 101, causal=False),
    "empty shards": case(DilationPattern((4, 8, 16), (1, 2, 3)), 9, heads=(9, 3)),
    "one position a rank": case(DilationPattern((2, 8), (1, 2)), 8),
    "nothing seen": case(DilationPattern((24, 96), (3, 6)), 96),
    "dense": case(DENSE, 96, heads=(8, 2), batch=2),
    "dense odd": case(DENSE, 8 * 11, heads=(8, 4)),
    "dense padded": case(DENSE, 75),
    "dense both ways": case(DENSE, 61, causal=False),
    "dense, empty shards": case(DENSE, 9),
}


def compute(names: list[str], forms: tuple[str, ...]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """This rank's part of the results of each case and form."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in names:
        here = CASES[name]
        qkv, grad, _ = here.tensors()
        own, length = shard(rank, world, here.seq_len), shard_length(world, here.seq_len)
        for form in forms:
            # Padding is poisoned: whoever attends it fails.
            parts = [_padded(x.detach(), own, length, float("nan")).requires_grad_() for x in qkv]
            out = sequence_parallel_attention(*parts, here.pattern, form=form, causal=here.causal, seq_len=here.seq_len)
            grads = torch.autograd.grad(out, parts, _padded(grad, own, length, 1.0))
            found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
            for x in found.values():
                assert not x[:, own.length :].any(), "padding has an output or a gradient"
            results[name, form] = {key: x[:, : own.length].numpy() for key, x in found.items()}
    return results


def _padded(x: torch.Tensor, own, length: int, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(x[:, own.begin : own.end], (0, 0, 0, 0, 0, length - own.length), value=value)


LEFT_OUT = {
    # Each case runs on at least two numbers of ranks; many processes on few cores take their time.
    2: {"aligned batch", "grouped queries", "head groups", "padded", "shifted", "dense odd", "empty shards"},
    3: {"aligned", "all to all", "one KV head", "nothing seen", "dense both ways", "segments cut, both ways"},
    4: set(),
    8: {"aligned batch", "one KV head", "padded, both ways", "dense", "dense both ways", "dense padded", "all to all"},
}


@pytest.mark.parametrize("world", LEFT_OUT)
def test_every_form_equals_the_definition(world):
    names = [name for name in CASES if name not in LEFT_OUT[world]]
    parts = run(world, compute, names, FORMS)
    for name in names:
        here = CASES[name]
        qkv, grad, _ = here.tensors()
        out, _ = reference_attention(*qkv, here.pattern, here.causal)
        truth = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, qkv, grad)), strict=True))
        for form in FORMS:
            found = {key: torch.cat([torch.from_numpy(part[name, form][key]) for part in parts], 1) for key in truth}
            error, where = worst_error(found, truth)
            assert error < 1e-12, f"{name}, {form}: {where} is off by {error:.2e}"
