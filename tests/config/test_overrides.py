from __future__ import annotations

import pytest

from longnet.config.overrides import check_overrides

from .conftest import CONF


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_steps=3",
        "+trainer.max_steps=3",
        "~trainer.val_batches",
        "attention=dense",
        "attention=dense,dilated",
        "attention=glob(dilated*)",
        "optim.lr=range(1,4)",
        "optim.lr=interval(0.1,1)",
        "~experiment",
        "experiment=[stdlib_gpu]",
        "hydra.verbose=true",
        "hydra/launcher=whatever",
        "attention.layers=[dense,{name:dilated,shift:3}]",
        "attention.layers.0.shift=3",
        "callbacks.sample_prompt='class A:'",
        "attention.dilated={base: 64}",
    ],
)
def test_sound_overrides_pass(override: str) -> None:
    assert check_overrides([override], [CONF]) == ([override], [])


def test_unknown_keys_and_options_are_all_named() -> None:
    given = [
        "trainer.max_stepz=3",
        "modle=tiny",
        "seed=1",
        "attention=dense,dilatd",
        "max_steps=2",
        "optim.lr",
        "zzz=1",
    ]
    sound, problems = check_overrides(given, [CONF])
    assert sound == ["seed=1"]
    assert problems[0] == "trainer.max_stepz: unknown key; did you mean trainer.max_steps?"
    assert problems[1] == "modle: unknown key; did you mean model?"
    assert problems[2].startswith("attention=dilatd: no such file in conf/attention; expected one of block_sparse")
    assert problems[2].endswith("did you mean dilated?")
    assert problems[3] == "max_steps: unknown key; did you mean trainer.max_steps?"
    assert problems[4].startswith("optim.lr: not of the form key=value")
    assert problems[5].startswith("zzz: unknown key; expected one of seed, resume")
    assert len(problems) == 6


@pytest.mark.parametrize("override", ["attention=null", "attention=[null]", "attention=dense,null", "+attention=null"])
def test_no_option_is_none_of_the_options(override: str) -> None:
    sound, problems = check_overrides([override, "seed=1"], [CONF])
    assert sound == ["seed=1"]
    assert len(problems) == 1
    assert problems[0].startswith("attention=null: no such file in conf/attention; expected one of block_sparse, dense")
    assert problems[0].endswith("; left out, it is as in conf/train.yaml")
