"""From `attention.layers` to the blocks' own options: names looked up, geometric patterns written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from longnet.attention.pattern import DilationPattern

from .errors import ConfigError
from .schema import AttentionConfig, JobConfig
from .typed import Problems, convert, did_you_mean, show

# The blocks of longnet.attention.BLOCKS, which cannot be imported without torch. Those that run on the library's own
# operator take a backend and dropout; the others are FlexAttention's.
BLOCKS = ("dense", "dilated", "sliding_window", "block_sparse")
ON_OWN_OPERATOR = ("dense", "dilated")


def resolve_attention(job: JobConfig) -> list[dict[str, Any]]:
    """The block specs for `longnet.attention.build_block`, one an entry of `attention.layers`.

    Raises:
        ConfigError: if an entry names no block or has options that do not fit it.
    """
    problems = Problems()
    specs = collect_specs(job.attention, job.data.context_length, problems)
    if problems.lines:
        raise ConfigError(problems.lines)
    return specs


def collect_specs(attention: AttentionConfig, context: int, problems: Problems) -> list[dict[str, Any]]:
    """The specs of the entries that are sound; what is wrong with the others is put into `problems`."""
    if not attention.layers:
        problems.add("attention.layers", "attention.layers=[]: expected at least one block, for example [dilated]")
    specs = []
    for index, entry in enumerate(attention.layers):
        key = f"attention.layers[{index}]"
        options = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(options, Mapping):
            problems.add(key, f"{key}={show(entry)}: expected a block's name, or a mapping with name and its options")
            continue
        name = options.get("name")
        if name not in BLOCKS:
            hint = did_you_mean(str(name), BLOCKS)
            problems.add(key, f"{key}={show(name)}: expected one of {', '.join(BLOCKS)}{hint}")
            continue
        own = {option: value for option, value in options.items() if option != "name"}
        if spec := _spec(attention, name, own, context, key, problems):
            specs.append(spec)
    return specs


def _spec(
    attention: AttentionConfig, name: str, own: dict[str, Any], context: int, key: str, problems: Problems
) -> dict[str, Any] | None:
    found = len(problems.lines)
    spec: dict[str, Any] = {"name": name}
    if name in ON_OWN_OPERATOR:
        common = {"backend": attention.backend, "dropout": attention.dropout}
        given = {option: own.pop(option) for option in common if option in own}
        fitted = convert(AttentionConfig, {**common, **given}, problems, key)
        spec |= {"backend": fitted.backend, "dropout": fitted.dropout}
    elif attention.dropout:
        problems.add(
            "attention.dropout",
            f"attention.dropout={attention.dropout}: {name} has none; expected 0, or model.dropout instead",
        )
    if name == "dense":
        for option in own:
            problems.add(f"{key}.{option}", f"{key}.{option}: unknown option; dense has backend, dropout")
    else:
        section = getattr(attention, name)
        place = key if own else f"attention.{name}"
        options = asdict(convert(type(section), {**asdict(section), **own}, problems, place))
        spec |= _written_out(options, context, place, problems) if name == "dilated" else options
    return spec if len(problems.lines) == found else None


def _written_out(options: dict[str, Any], context: int, key: str, problems: Problems) -> dict[str, Any]:
    lengths, rates = options["segment_lengths"], options["dilation_rates"]
    shared = {"heads": options["heads"], "shift": options["shift"]}
    try:
        if lengths is None and rates is None:
            return DilationPattern.geometric(context, options["base"], options["ratio"], **shared).to_config()
        if lengths is None or rates is None:
            missing = "segment_lengths" if lengths is None else "dilation_rates"
            problems.add(
                f"{key}.{missing}",
                f"{key}.{missing}=null, but the other list is {show(rates if lengths is None else lengths)}: "
                "give both, or neither for a geometric pattern",
            )
            return {}
        return DilationPattern(tuple(lengths), tuple(rates), **shared).to_config()
    except ValueError as error:
        problems.add(key, f"{key}: {error}")
        return {}
