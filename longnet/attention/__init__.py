"""Dilated attention: one definition, several ways to compute it.

Names are resolved on first use, so that checking a pattern does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import BLOCKS as BLOCKS
    from .blocks import build_block as build_block
    from .dilated import BACKENDS as BACKENDS
    from .dilated import dilated_attention as dilated_attention
    from .dilated import explain_backend as explain_backend
    from .modules import DilatedAttention as DilatedAttention
    from .modules import MultiheadDilatedAttention as MultiheadDilatedAttention
    from .pattern import NAMED_PATTERNS as NAMED_PATTERNS
    from .pattern import DilationPattern as DilationPattern
    from .reference import reference_attention as reference_attention

_HOME = {
    "BACKENDS": "dilated",
    "BLOCKS": "blocks",
    "DilatedAttention": "modules",
    "DilationPattern": "pattern",
    "MultiheadDilatedAttention": "modules",
    "NAMED_PATTERNS": "pattern",
    "build_block": "blocks",
    "dilated_attention": "dilated",
    "explain_backend": "dilated",
    "reference_attention": "reference",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
