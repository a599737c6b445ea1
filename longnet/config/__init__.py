"""The typed configuration of a job: nothing here imports torch, so that a bad config is answered at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import resolve_attention as resolve_attention
    from .errors import ConfigError as ConfigError
    from .errors import JobError as JobError
    from .loading import load as load
    from .schema import JobConfig as JobConfig

_HOME = {
    "ConfigError": "errors",
    "JobConfig": "schema",
    "JobError": "errors",
    "load": "loading",
    "resolve_attention": "attention",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
