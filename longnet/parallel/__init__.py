"""Sequence parallelism: one sequence over several ranks, with the same result as on one.

Names are resolved on first use, so that checking a config does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import FORMS as FORMS
    from .attention import sequence_parallel_attention as sequence_parallel_attention
    from .communication import attention_traffic as attention_traffic
    from .group import SequenceGroup as SequenceGroup
    from .mesh import MeshShape as MeshShape
    from .modules import RingDilatedAttention as RingDilatedAttention
    from .modules import RingMultiheadDilatedAttention as RingMultiheadDilatedAttention
    from .share import SequenceShare as SequenceShare

_HOME = {
    "FORMS": "attention",
    "MeshShape": "mesh",
    "RingDilatedAttention": "modules",
    "RingMultiheadDilatedAttention": "modules",
    "SequenceGroup": "group",
    "SequenceShare": "share",
    "attention_traffic": "communication",
    "sequence_parallel_attention": "attention",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
