"""Every yaml in conf/: composes, loads through the schema, and explains its keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from longnet.config import JobConfig, load, resolve_attention
from longnet.config.loading import KNOWN_KEYS
from longnet.config.machine import Machine
from longnet.config.overrides import find_groups

from .conftest import CONF

GROUPS = find_groups(CONF)
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]
FILES = sorted(CONF.rglob("*.yaml"))
A_MACHINE = Machine(gpus=8)

Compose = Callable[..., DictConfig]


def test_the_groups_of_the_design() -> None:
    expected = {"model", "attention", "data", "optim", "trainer", "strategy", "logger", "callbacks"}
    assert set(GROUPS) == expected | {"experiment", "debug", "paths", "hydra/launcher"}


def test_the_default_job_has_every_key_of_the_schema(compose_job: Compose) -> None:
    """So that each can be given on the command line as key=value."""
    cfg = compose_job()
    assert set(_leaves(cfg)) == set(KNOWN_KEYS)
    assert load(cfg, A_MACHINE).run.name == "tiny-dilated-stdlib"


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_loads(group: str, option: str, compose_job: Compose) -> None:
    # What has no value of its own is given one.
    missing = re.findall(r"^(\w+): \?\?\?", (CONF / group / f"{option}.yaml").read_text(), re.MULTILINE)
    cfg = compose_job(f"{group}={option}", *(f"{group}.{key}={CONF}" for key in missing))
    job = load(cfg, A_MACHINE)
    assert isinstance(job, JobConfig)
    assert resolve_attention(job)
    assert set(_leaves(cfg)) == set(KNOWN_KEYS)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_can_be_debugged(experiment: str, compose_job: Compose) -> None:
    job = load(compose_job(f"experiment={experiment}", "debug=fast_dev"), A_MACHINE)
    assert job.trainer.max_steps == 1
    assert job.trainer.devices == 1
    assert job.run.root == "runs/debug"


@pytest.mark.parametrize("attention", GROUPS["attention"])
@pytest.mark.parametrize("context", [64, 32768])
def test_every_attention_serves_short_and_long_contexts(attention: str, context: int, compose_job: Compose) -> None:
    job = load(compose_job(f"attention={attention}", f"data.context_length={context}"), A_MACHINE)
    assert resolve_attention(job)


def test_a_short_run_needs_no_other_key(compose_job: Compose) -> None:
    job = load(compose_job("trainer.max_steps=3"), A_MACHINE)
    assert job.optim.warmup_steps == 0
    assert load(compose_job("trainer.max_steps=100000"), A_MACHINE).optim.warmup_steps == 100


def test_shifted_layers_are_half_a_segment_apart(compose_job: Compose) -> None:
    first, second = resolve_attention(load(compose_job("attention=dilated_shifted"), A_MACHINE))
    assert (first["shift"], second["shift"]) == (0, min(first["segment_lengths"]) // 2)


def test_torchrun_says_how_many_processes_there_are(compose_job: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    torchrun = Machine(gpus=4, world_size=8, local_world_size=4, multi_node_launcher=True)
    job = load(compose_job("strategy=ddp"), torchrun)
    assert (job.trainer.devices, job.trainer.num_nodes) == (4, 2)


def test_a_broken_reference_and_a_missing_value_are_problems_like_others(compose_job: Compose) -> None:
    with pytest.raises(ValueError, match=r"(?s)3 problems.*optim.lr: Interpolation key 'nowhere'.*seed: has no value"):
        load(compose_job("optim.lr=${nowhere}", "seed=???", "trainer.max_steps=0"), A_MACHINE)


def test_no_config_names_code_to_run_but_the_sweep_callback() -> None:
    lines = [line.strip() for file in FILES for line in file.read_text().splitlines()]
    targets = [line for line in lines if line.startswith("_target_")]
    assert targets == ["_target_: longnet.config.sweep.SweepCallback"]


def test_every_key_is_explained_where_it_stands() -> None:
    explained = {key for file in FILES for key in _explained_keys(file)}
    assert set(KNOWN_KEYS) - explained == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CONF).as_posix())
def test_every_file_says_what_it_is(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("#")
    assert isinstance(yaml.safe_load(text), dict)


def _leaves(cfg: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for name in cfg:
        if name == "hydra" and not prefix:
            continue
        value = cfg._get_node(name)
        is_section = isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation()
        found += _leaves(value, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return found


def _explained_keys(file: Path) -> list[str]:
    """The dotted keys of a file with a comment behind them or right above them."""
    lines = file.read_text().splitlines()
    group = file.parent.relative_to(CONF).as_posix()
    is_global = group == "." or any(line.startswith("# @package _global_") for line in lines)
    path: list[tuple[int, str]] = []
    keys = []
    for number, line in enumerate(lines):
        if found := re.match(r"( *)(\w+):(.*)", line):
            indent = len(found[1])
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, found[2])]
            above = number > 0 and lines[number - 1].strip().startswith("#")
            if " # " in found[3] or above:
                keys.append(".".join([*([] if is_global else [group]), *(name for _, name in path)]))
    return keys
