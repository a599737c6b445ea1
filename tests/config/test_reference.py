"""The reference of the configuration is complete and current."""

from __future__ import annotations

from pathlib import Path

from longnet.config.loading import KNOWN_KEYS
from longnet.config.overrides import find_groups
from longnet.config.reference import build_reference

ROOT = Path(__file__).parents[2]
PAGE = build_reference(ROOT / "conf")


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == PAGE, "run `make docs`"


def test_every_key_and_option_is_there_with_an_explanation() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    for key in KNOWN_KEYS:
        assert len(rows[key].split(" | ")[-1].strip(" |")) > 3, key
    for group, options in find_groups(ROOT / "conf").items():
        for option in options:
            assert len(rows[f"{group}={option}"].split("|")[2].strip()) > 5


def test_types_ranges_and_defaults_are_told() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    assert "| integer, at least 1 | `2048` |" in rows["data.context_length"]
    assert "`none`, `selective`, `full`, `offload`" in rows["trainer.activation_checkpointing.kind"]
    assert "| integer or null, at least 1 | `null` |" in rows["trainer.tile"]
    assert "recomputed" not in rows["seed"]
    assert "Seeds the weights" in rows["seed"]
