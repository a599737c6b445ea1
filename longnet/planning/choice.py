"""Which plan to train by: the cheapest that fits, and what the others would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .flops import recomputed_flops
from .memory import predict_memory
from .workload import Kind, MemoryPlan, Workload

KINDS: tuple[Kind, ...] = ("none", "selective", "full", "offload")
# Positions: enough for fast products, few enough that the MLP of a tile is no part of the peak.
TILE = 16384
# Of the memory there is; the rest is for the libraries' own buffers and for gaps between tensors.
USABLE = 0.92


def candidate_plans(workload: Workload, host_bytes: int = 0, tile: int = TILE) -> list[MemoryPlan]:
    """The plans worth trying, by what they compute again, least first; each needs less memory than those before it.

    Args:
        workload: what is trained.
        host_bytes: host memory there is for activations.
        tile: positions of a tile, for the plans that have them.
    """
    tiles = [None, tile] if workload.context_length > tile else [None]
    plans = [MemoryPlan(kind, 1, size) for kind in KINDS for size in tiles]
    plans.sort(key=lambda plan: (recomputed_flops(workload, plan), plan.kind == "offload"))
    useful: list[MemoryPlan] = []
    for plan in plans:
        needed = predict_memory(workload, plan)
        smaller = all(needed.device < predict_memory(workload, other).device for other in useful)
        if smaller and needed.host <= USABLE * host_bytes:
            useful.append(plan)
    return useful


def choose_plan(workload: Workload, plans: Sequence[MemoryPlan], device_bytes: int) -> MemoryPlan | None:
    """The first plan that fits into the device's memory; None if none does."""
    fitting = (plan for plan in plans if predict_memory(workload, plan).device <= USABLE * device_bytes)
    return next(fitting, None)


def longest_context(workload: Workload, device_bytes: int, host_bytes: int = 0, step: int = 1024) -> int:
    """The longest context, in multiples of ``step``, at which some plan fits; 0 where none does.

    Args:
        workload: what is trained; its own context does not matter, its pattern is kept.
        device_bytes: memory of the device.
        host_bytes: host memory there is for activations.
        step: what contexts are multiples of.
    """

    def fits(multiple: int) -> bool:
        shorter = replace(workload, context_length=multiple * step)
        return choose_plan(shorter, candidate_plans(shorter, host_bytes), device_bytes) is not None

    # More than fits, then the border between what does and what does not.
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


@dataclass(frozen=True)
class Saving:
    """A change to the config, and the bytes of device memory by which the predicted peak falls."""

    change: str
    bytes: int


def suggest_savings(workload: Workload, plan: MemoryPlan, tile: int = TILE) -> list[Saving]:
    """What would lower the peak, the cheapest change first."""
    options: list[tuple[str, Workload, MemoryPlan]] = []
    if workload.precision == "bf16" and workload.residual == "fp32":
        options.append(("trainer.residual=bf16", replace(workload, residual="bf16"), plan))
    if plan.every > 1:
        options.append(("trainer.activation_checkpointing.every=1", workload, replace(plan, every=1)))
    for kind in KINDS[KINDS.index(plan.kind) + 1 :]:
        options.append((f"trainer.activation_checkpointing.kind={kind}", workload, replace(plan, kind=kind)))
    if plan.tile is None and workload.context_length > tile:
        options.append((f"trainer.tile={tile}", workload, replace(plan, tile=tile)))
        strongest = replace(plan, kind="offload", every=1, tile=tile)
        change = f"trainer.activation_checkpointing.kind=offload trainer.tile={tile}"
        options.append((change, workload, strongest))
    if workload.batch_size > 1:
        half = workload.batch_size // 2
        change = f"data.batch_size={half} with trainer.accumulate raised as much"
        options.append((change, replace(workload, batch_size=half), plan))
    half = workload.context_length // 2
    options.append((f"data.context_length={half}", replace(workload, context_length=half), plan))
    now = predict_memory(workload, plan).device
    savings = [Saving(change, now - predict_memory(load, other).device) for change, load, other in options]
    return [saving for saving in savings if saving.bytes > 0]
