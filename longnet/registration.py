"""Tells transformers about LongNet as soon as both are imported, in whichever order.

transformers and torch take seconds to import, and checking a config needs neither: so they are waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register() -> None:
    """Registers the model type and the attention implementation now, or when transformers is imported."""
    if "transformers" in sys.modules:
        import_module("longnet.model")
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self.loader
        if "longnet.model" not in sys.modules:
            import_module("longnet.model")
