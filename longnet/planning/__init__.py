"""What a training step costs, in bytes and in floating-point operations, before anything is built.

Nothing here imports torch, except for the FLOPs of attention blocks, which the blocks themselves count.
"""

from .choice import Saving, candidate_plans, choose_plan, longest_context, suggest_savings
from .flops import Flops, count_flops, recomputed_flops
from .memory import MemoryEstimate, count_parameters, predict_memory
from .patterns import PatternChoice, pattern_choices, recommend
from .time import Rates, TimeEstimate, predict_time
from .workload import MemoryPlan, RankShare, Workload

__all__ = [
    "Flops",
    "MemoryEstimate",
    "MemoryPlan",
    "PatternChoice",
    "RankShare",
    "Rates",
    "Saving",
    "TimeEstimate",
    "Workload",
    "candidate_plans",
    "choose_plan",
    "count_flops",
    "count_parameters",
    "longest_context",
    "pattern_choices",
    "predict_memory",
    "predict_time",
    "recommend",
    "recomputed_flops",
    "suggest_savings",
]
