"""What a rank holds at its peak, by the bytes that torch allocates: a p-th of what one rank alone holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from longnet.attention import DilationPattern
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.parallel import SequenceGroup
from longnet.parallel.share import attend_over

from .processes import run

N = 2048
RANKS = (1, 2, 4, 8)


def peak_bytes(form: str, size: int) -> int:
    """Bytes of activations at the peak of a forward and a backward pass over a rank's shard."""
    pattern = DilationPattern.geometric(N, base=32)
    torch.manual_seed(0)
    config = LongNetConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=N,
        attention=[{"name": "dilated", **pattern.to_config()}],
    )  # fmt: skip
    model = LongNetForCausalLM(config)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    if size > 1:
        attend_over(model, form, SequenceGroup.of(groups[dist.get_rank() // size]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    length = N // size
    ids = torch.randint(config.vocab_size, (1, length))
    positions = torch.arange(length)[None] + length * (dist.get_rank() % size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model.hidden_states(ids, positions).square().sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measure() -> dict[tuple[str, int], int]:
    return {(form, size): peak_bytes(form, size) for form in ("gather", "ring") for size in RANKS}


def test_peak_memory_falls_with_the_ranks():
    ranks = run(max(RANKS), measure, timeout=120)
    for form, size in ranks[0]:
        alone, peak = (max(rank[form, number] for rank in ranks) for number in (1, size))
        assert peak * size < 1.15 * alone, f"{form}, {size} ranks: {peak} bytes, alone {alone}"
