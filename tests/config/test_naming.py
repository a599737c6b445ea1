from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.config.naming import as_run_name, is_run_name, with_swept

GROUPS = {"attention", "model"}


@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        ([("attention", "dense")], "tiny-dense-stdlib"),
        ([("attention", "hybrid")], "tiny-dense-stdlib-hybrid"),
        ([("optim.lr", "0.001")], "tiny-dense-stdlib-lr=0.001"),
        ([("attention", "dense"), ("optim.lr", "0.001"), ("seed", "1")], "tiny-dense-stdlib-lr=0.001-seed=1"),
        (
            [("model.dropout", "0"), ("attention.dropout", "0.1")],
            "tiny-dense-stdlib-model.dropout=0-attention.dropout=0.1",
        ),
        ([("attention.layers", "[dense,dilated]")], "tiny-dense-stdlib-layers=dense_dilated"),
        ([("run.name", "anything")], "tiny-dense-stdlib"),
    ],
)
def test_what_varies_stands_behind_the_name(swept: list[tuple[str, str]], expected: str) -> None:
    assert with_swept("tiny-dense-stdlib", swept, GROUPS) == expected


@given(st.text(max_size=300), st.text(max_size=300))
def test_names_are_sound_and_distinct_whatever_varies(one: str, other: str) -> None:
    key = "callbacks.sample_prompt"
    names = [with_swept("tiny", [(key, repr(value))], GROUPS) for value in (one, other)]
    assert all(is_run_name(name) for name in names)
    assert (names[0] == names[1]) == (one == other)


@given(st.text())
def test_a_suggested_name_is_a_sound_one(text: str) -> None:
    assert is_run_name(as_run_name(text) or "my-run")
