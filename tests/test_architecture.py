"""The direction of imports, and the few rules that keep the project readable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "longnet").rglob("*.py"))

# What each package may import of ours. Upper layers may import lower ones, never the reverse.
MAY_IMPORT = {
    "attention": set(),
    "checkpoint": set(),
    "data": {"attention"},
    "model": {"attention"},
    "parallel": {"attention", "checkpoint"},
    "planning": {"attention"},
    "config": {"attention", "checkpoint", "data", "evaluation", "model", "parallel", "planning"},
    "evaluation": {"attention", "data", "model", "parallel", "planning", "config"},
    "training": {"attention", "checkpoint", "data", "model", "parallel", "planning", "config", "evaluation"},
}
ONLY_IN = {
    "lightning": {"training", "parallel"},
    "hydra": {"config"},
    "omegaconf": {"config"},
}


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *((node.module,) if node.module else ())))
            names |= {prefix, *(f"{prefix}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT / "longnet").with_suffix("").parts
    if parts == ("__init__",):
        return
    package = parts[0]
    for name in imported(path):
        library, *rest = name.split(".")
        if library == "longnet" and rest and rest[0] != package:
            assert rest[0] in MAY_IMPORT[package], f"{package} may not import longnet.{rest[0]}"
        if library in ONLY_IN:
            assert package in ONLY_IN[library], f"only {ONLY_IN[library]} may import {library}"
    if package == "attention":
        libraries = {name.split(".")[0] for name in imported(path)} - {"longnet"}
        standard = {"__future__", "abc", "collections", "dataclasses", "difflib", "functools", "importlib", "itertools"}
        kernels = {"numpy", "triton"} if "kernels" in parts else set()
        assert libraries <= {"torch", "einops", "math", "operator", "typing", *standard, *kernels}


@pytest.mark.parametrize("path", [*MODULES, *(ROOT / "scripts").glob("*.py"), ROOT / "train.py"], ids=lambda p: p.name)
def test_a_file_is_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
    assert path.name != "utils.py"
