"""What must go together when a job begins from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from longnet.data.pretrained import FETCHABLE, is_fetchable

from .schema import JobConfig
from .typed import Problems, show

ON_THE_OPERATOR = ("dense", "dilated")


def check_finetune(job: JobConfig, problems: Problems) -> None:
    """Reports what would stop or spoil training from a checkpoint."""
    path = job.model.pretrained
    if problems.about("model.pretrained"):
        return
    if path is None:
        _check_from_nothing(job, problems)
    elif not os.path.exists(path) and not is_fetchable(path):
        problems.add(
            "model.pretrained",
            f"model.pretrained={show(path)}: no such directory; expected a checkpoint's, a .gguf file, or a directory "
            f"of the name {' or '.join(FETCHABLE)}, which is fetched",
        )
    if job.finetune.train == "lora" and find_spec("peft") is None:
        problems.add("finetune.train", "finetune.train=lora: peft is not installed; expected pip install peft")
    if job.finetune.train == "lora" and not job.finetune.lora_targets:
        problems.add(
            "finetune.lora_targets",
            "finetune.lora_targets=[]: expected at least one projection for finetune.train=lora, such as "
            "[q_proj, v_proj]",
        )
    if job.model.keep_code:
        _check_own_code(job, problems)
    if not problems.about("finetune.context_growth", "data.context_length"):
        _check_growth(job, problems)
    if job.strategy.sequence_parallel_size > 1:
        _check_shared_sequences(job, problems)


def _check_from_nothing(job: JobConfig, problems: Problems) -> None:
    needs = {
        "model.keep_code": job.model.keep_code,
        "model.rope_extension": job.model.rope_extension != "keep",
        "finetune.train": job.finetune.train != "all",
    }
    for key in (key for key, wanted in needs.items() if wanted and not problems.about(key)):
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        problems.add(key, f"{key}={show(value)}: needs a checkpoint to begin from; give one by model.pretrained=DIR")


def _check_own_code(job: JobConfig, problems: Problems) -> None:
    entries = job.attention.layers
    layers = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    # What is no block at all is reported with the attention.
    blocks = all(isinstance(entry, (str, Mapping)) for entry in entries)
    if blocks and (len(layers) != 1 or layers[0] not in ON_THE_OPERATOR):
        problems.add(
            "attention.layers",
            f"attention.layers={show(job.attention.layers)}: model.keep_code=true takes one pattern for all layers; "
            "expected [dilated] or [dense]",
        )
    kind, tile = job.trainer.activation_checkpointing.kind, job.trainer.tile
    if kind not in ("none", "full") or tile:
        problems.add(
            "trainer.activation_checkpointing.kind",
            f"trainer.activation_checkpointing.kind={kind} trainer.tile={tile}: model.keep_code=true has transformers' "
            "own checkpointing; expected none or full, and no tiles",
        )


def _check_shared_sequences(job: JobConfig, problems: Problems) -> None:
    size = f"strategy.sequence_parallel_size={job.strategy.sequence_parallel_size}"
    if job.model.keep_code:
        problems.add("model.keep_code", f"model.keep_code=true: {size} needs our own layers; expected false")
    if job.finetune.context_growth and not problems.about("finetune.context_growth"):
        problems.add(
            "finetune.context_growth",
            f"finetune.context_growth={show(job.finetune.context_growth)}: with {size} a process has a part of each "
            "row, which cannot be cut further; expected [], and one run for each context",
        )


def _check_growth(job: JobConfig, problems: Problems) -> None:
    key, stages, context = "finetune.context_growth", job.finetune.context_growth, job.data.context_length
    pairs = [stage for stage in stages if isinstance(stage, (list, tuple)) and len(stage) == 2]
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for pair in pairs for x in pair)
    if len(pairs) != len(stages) or not numbers:
        problems.add(
            key, f"{key}={show(stages)}: expected pairs of a context and a share of the steps, such as [[2048, 0.5]]"
        )
        return
    for length, share in pairs:
        # nan and inf are outside, and have no int.
        if not 1 <= length <= context or length != int(length) or context % int(length):
            problems.add(key, f"{key} has {length}: expected a divisor of data.context_length={context}")
        if not 0 < share < 1:
            problems.add(key, f"{key} has {share}: expected a share of the steps, above 0 and below 1")
    if [share for _, share in pairs] != sorted({share for _, share in pairs}):
        problems.add(key, f"{key}={show(stages)}: expected rising shares")
    if pairs and job.data.packing != "concat":
        problems.add(key, f"{key}={show(stages)}: expected data.packing=concat, whose rows can be cut anywhere")
