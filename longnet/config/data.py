"""What the data's keys must have in common, as far as it can be known without reading it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from glob import has_magic
from typing import Any

from longnet.data.documents import taken_by, wrong_options
from longnet.data.pretrained import is_fetchable

from .bounds import check_bound
from .schema import DataConfig, JobConfig
from .typed import LARGEST, Problems, convert, did_you_mean, show

NEED_PATH = ("text", "jsonl", "parquet", "arrow", "hf", "prepared")
TASKS = ("passkey", "needle", "multi_key", "recall", "lookup", "copy", "multi_hop", "variable_tracking")
CAN_STREAM = ("stdlib", "text", "jsonl", "parquet", "arrow", "hf")
# What the parts of a mixture share, since their rows go into the same batches.
OF_THE_WHOLE = ("context_length", "batch_size", "num_workers", "mixture", "streaming", "block_rows", "packing")
PART_KEYS = ("weight", "name", *(f.name for f in fields(DataConfig) if f.name not in OF_THE_WHOLE))


def check_data(job: JobConfig, problems: Problems) -> None:
    """Reports what would stop the reading of the data."""
    data = job.data
    if problems.about("data.source"):
        return
    if not problems.about("data.path"):
        _check_path("data", data.source, data.path, problems)
    if not problems.about("data.tokenizer"):
        _check_tokenizer(data.source, data.tokenizer, problems)
    if data.streaming and not problems.about("data.streaming", "data.packing"):
        _check_stream(job, problems)
    if not problems.about("data.sample_lengths", "data.context_length"):
        _check_sample_lengths("data", data.sample_lengths, data.context_length, problems)
    sources: list[str] = [data.source]
    if data.source == "mixture":
        sources = [str(part.get("source")) for part in data.mixture if isinstance(part, Mapping)]
    if sources:
        _check_options("data", vars(data), sources, problems)
    if data.source == "mixture" and not problems.about("data.mixture"):
        _check_mixture(data, problems)


def _check_path(place: str, source: str, path: Any, problems: Problems) -> None:
    key = f"{place}.path"
    if path is None:
        if source in NEED_PATH:
            problems.add(key, f"{key}=null: {place}.source={source} needs one; give it by {key}=...")
    elif source != "hf" and not has_magic(str(path)) and not os.path.exists(str(path)):
        own = "" if source in NEED_PATH else f"; null lets {place}.source={source} find its own"
        problems.add(key, f"{key}={show(path)}: no such file or directory{own}")


def _check_options(place: str, options: Mapping[str, Any], sources: Sequence[str], problems: Problems) -> None:
    for name, line in wrong_options(options, *sources).items():
        if not problems.about(f"{place}.{name}"):
            problems.add(f"{place}.{name}", f"{place}.{line}")


def _check_sample_lengths(place: str, lengths: Any, context_length: int, problems: Problems) -> None:
    if lengths is None:
        return
    counts = isinstance(lengths, Sequence) and [isinstance(n, int) and 0 < n <= context_length for n in lengths]
    if not counts or not all(counts):
        key = f"{place}.sample_lengths"
        problems.add(key, f"{key}={show(lengths)}: expected lengths from 1 to data.context_length={context_length}, or "
                     "null")  # fmt: skip


def _check_tokenizer(source: str, tokenizer: str | None, problems: Problems) -> None:
    if tokenizer is None and source not in ("prepared", "mixture"):
        problems.add("data.tokenizer", f"data.tokenizer=null: only a prepared store has its own; data.source={source} "
                     "takes bytes or a tokenizer's directory")  # fmt: skip
    elif tokenizer not in (None, "bytes") and not os.path.isdir(tokenizer) and not is_fetchable(tokenizer):
        problems.add(
            "data.tokenizer",
            f"data.tokenizer={show(tokenizer)}: expected bytes, or the directory of a Hugging Face tokenizer"
            f"{did_you_mean(tokenizer, ['bytes'])}",
        )


def _check_stream(job: JobConfig, problems: Problems) -> None:
    data = job.data
    if data.source not in CAN_STREAM:
        problems.add(
            "data.streaming",
            f"data.streaming=true: data.source={data.source} is not read from documents; expected false, or one of "
            f"{', '.join(CAN_STREAM)}",
        )
    if data.packing == "whole":
        problems.add(
            "data.packing",
            "data.packing=whole: a stream does not know the documents to come; expected concat or isolate, or "
            "data.streaming=false",
        )
    if job.trainer.overfit_batches and not problems.about("trainer.overfit_batches"):
        problems.add(
            "trainer.overfit_batches",
            f"trainer.overfit_batches={job.trainer.overfit_batches}: a stream has no first batches to come back to; "
            "expected 0, or data.streaming=false",
        )


def _check_mixture(data: DataConfig, problems: Problems) -> None:
    if not data.mixture:
        problems.add("data.mixture", "data.mixture=[]: expected the parts of data.source=mixture, such as "
                     "[{source: stdlib, weight: 0.9}, {source: passkey, weight: 0.1}]")  # fmt: skip
    for number, part in enumerate(data.mixture):
        place = f"data.mixture[{number}]"
        if not isinstance(part, Mapping):
            problems.add(place, f"{place}={show(part)}: expected a mapping with a source and a weight")
            continue
        for key in part:
            if key not in PART_KEYS:
                problems.add(place, f"{place}.{key}: unknown key{did_you_mean(str(key), PART_KEYS)}")
        source, weight = part.get("source"), part.get("weight")
        known = (*CAN_STREAM, "prepared", *TASKS)
        if source not in known:
            problems.add(place, f"{place}.source={show(source)}: expected one of {', '.join(known)}")
        else:
            _check_path(place, source, part.get("path", data.path), problems)
            _check_options(place, {**taken_by(source, vars(data)), **part}, [source], problems)
        _check_sample_lengths(place, part.get("sample_lengths"), data.context_length, problems)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= LARGEST:
            problems.add(place, f"{place}.weight={show(weight)}: expected a finite number above 0")
        # The rest as in data itself, where it is not already known to be wrong.
        own = {
            key: value
            for key, value in part.items()
            if key in PART_KEYS and key not in ("source", "weight", "name") and not problems.about(f"{place}.{key}")
        }
        fitted = convert(DataConfig, own, problems, place)
        for key in own:
            check_bound(f"data.{key}", getattr(fitted, key), problems, f"{place}.{key}")
        data.mixture[number] = {**part, **{key: getattr(fitted, key) for key in own}}
