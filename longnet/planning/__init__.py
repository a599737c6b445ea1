"""What a training step costs, in bytes and in floating-point operations, before anything is built.

Nothing here imports torch, except for the FLOPs of attention blocks, which the blocks themselves count.
"""

from .choice import Saving, candidate_plans, choose_plan, suggest_savings
from .flops import Flops, count_flops, recomputed_flops
from .memory import MemoryEstimate, count_parameters, predict_memory
from .workload import MemoryPlan, Workload

__all__ = [
    "Flops",
    "MemoryEstimate",
    "MemoryPlan",
    "Saving",
    "Workload",
    "candidate_plans",
    "choose_plan",
    "count_flops",
    "count_parameters",
    "predict_memory",
    "recomputed_flops",
    "suggest_savings",
]
