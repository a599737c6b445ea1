from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.config import ConfigError, JobConfig, load
from longnet.config.typed import leaves

from .conftest import CPU_ONLY, load_with, problems_with

KEYS = [key for key, _ in leaves(JobConfig)]


def test_the_defaults_of_the_schema_are_a_sound_job() -> None:
    assert load(asdict(JobConfig()), CPU_ONLY) == JobConfig()


def test_numbers_come_in_the_forms_that_yaml_gives_them() -> None:
    job = load_with(trainer__max_steps=1e6, optim__lr=1, run__name=7, trainer__compile=True)
    assert (job.trainer.max_steps, job.optim.lr, job.run.name, job.trainer.compile) == (1_000_000, 1.0, "7", "on")
    assert isinstance(job.trainer.max_steps, int)
    assert isinstance(job.optim.lr, float)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer__max_steps", "many", "trainer.max_steps='many': expected an integer"),
        ("trainer__max_steps", 10.5, "trainer.max_steps=10.5: expected an integer; the nearest is 10"),
        ("trainer__max_steps", True, "trainer.max_steps=true: expected an integer"),
        ("trainer__max_steps", None, "trainer.max_steps=null: expected an integer"),
        ("trainer__max_steps", 10**400, "expected an integer"),
        ("optim__lr", float("nan"), "optim.lr=nan: expected a finite number"),
        ("model__gated_mlp", "yes", "model.gated_mlp='yes': expected true or false"),
        ("run__name", None, "run.name=null: expected text"),
        ("optim__betas", 0.9, "optim.betas=0.9: expected a list, for example [0.9]"),
        ("optim__betas", [0.9, "x"], "optim.betas[1]='x': expected a finite number"),
        ("optim__schedule", "cosin", "expected one of cosine, linear, polynomial, wsd, constant; did you mean cosine?"),
        ("data", 3, "data=3: expected a mapping with source, path"),
    ],
)
def test_a_wrong_type_is_named_with_its_value_and_what_was_expected(key: str, value: Any, expected: str) -> None:
    (problem,) = problems_with(**{key: value})
    assert expected in problem


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer__max_stepz", "trainer.max_steps"),
        ("trainer__lr", "optim.lr"),
        ("max_steps", "trainer.max_steps"),
        ("attention__dilated__segment_length", "attention.dilated.segment_lengths"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(key: str, meant: str) -> None:
    assert problems_with(**{key: 1}) == [f"{key.replace('__', '.')}: unknown key; did you mean {meant}?"]


def test_an_unknown_key_like_no_other_gets_the_list() -> None:
    assert problems_with(run__zzz=1) == ["run.zzz: unknown key; expected one of run.name, run.root"]


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_with(
        trainer__max_stepz=1,
        optim__lr="high",
        optim__schedule="cosin",
        data__batch_size=0,
        model__num_key_value_heads=3,
        trainer__precision="fp16",
        resume="/nowhere",
    )
    keys = ["trainer.max_stepz", "optim.lr", "optim.schedule", "data.batch_size"]
    keys += ["model.num_key_value_heads", "trainer.precision", "resume"]
    assert [problem.split("=")[0].split(":")[0] for problem in sorted(problems)] == sorted(keys)


def test_the_message_has_one_line_a_problem() -> None:
    with pytest.raises(ConfigError, match=r"^2 problems in the configuration:\n  seed=-1.*\n  optim\.lr=0"):
        load_with(seed=-1, optim__lr=0)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=300),
    st.lists(st.one_of(st.integers(-3, 5000), st.text(max_size=5), st.floats(), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["name", "shift", "heads", "x"]), st.one_of(st.integers(), st.just("dilated"))),
    st.lists(
        st.fixed_dictionaries(
            {"name": st.sampled_from(["dense", "dilated", "sliding_window", "block_sparse", "dens", None])},
            optional={
                "shift": st.integers(-1, 10),
                "segment_lengths": st.lists(st.integers(-1, 4096), max_size=3),
                "dilation_rates": st.lists(st.integers(-1, 8), max_size=3),
                "window": st.integers(-1, 5),
                "dropout": st.floats(),
            },
        ),
        max_size=3,
    ),
)


@given(st.dictionaries(st.sampled_from([*KEYS, "data", "attention.dilated", "nonsense"]), VALUES, max_size=5))
def test_any_values_end_in_a_job_or_in_a_config_error(values: dict[str, Any]) -> None:
    sections = {key: value for key, value in values.items() if key in ("data", "attention.dilated")}
    values = {key: value for key, value in values.items() if not key.startswith(tuple(f"{s}." for s in sections))}
    problems = []
    try:
        load_with(**{key.replace(".", "__"): value for key, value in values.items()})
    except ConfigError as error:
        problems = error.problems or ["\n"]
    assert all("\n" not in problem for problem in problems)
