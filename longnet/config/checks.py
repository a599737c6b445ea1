"""What must go together: the checks across keys, all of them run, all of their findings reported."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .attention import collect_specs
from .bounds import check_bounds
from .data import check_data
from .evaluation import check_evaluation
from .finetune import check_finetune
from .machine import Machine
from .naming import LONGEST_NAME, as_run_name, is_run_name
from .schema import JobConfig
from .sequence_parallel import check_sequence_parallel
from .typed import Problems, show

# ByT5's 3 special ids and the 256 bytes.
BYTE_IDS = 259

# How far a suggestion is looked for.
SEARCHED = 10_000


def check(job: JobConfig, problems: Problems, machine: Machine) -> None:
    """Adds to `problems` everything that would stop or spoil the job, as far as it can be known without torch."""
    check_bounds(job, problems)
    _check_heads(job, problems)
    _check_vocabulary(job, problems)
    check_data(job, problems)
    check_finetune(job, problems)
    _check_attention(job, problems)
    _check_checkpointing(job, problems)
    _check_memory(job, problems)
    _check_schedule(job, problems)
    _check_tokens_per_step(job, problems)
    _check_accelerator(job, problems, machine)
    _check_processes(job, problems, machine)
    check_sequence_parallel(job, problems)
    _check_run(job, problems)
    _check_loggers(job, problems)
    _check_evaluation(job, problems)


def _check_heads(job: JobConfig, problems: Problems) -> None:
    model = job.model
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    if problems.about("model.num_attention_heads"):
        return
    if kv_heads is not None and not problems.about("model.num_key_value_heads") and heads % kv_heads:
        problems.add(
            "model.num_key_value_heads",
            f"model.num_key_value_heads={kv_heads}: expected a divisor of model.num_attention_heads={heads}; "
            f"the nearest is {_nearest_divisor(heads, kv_heads)}",
        )
    if problems.about("model.hidden_size", "model.head_dim"):
        return
    if head_dim is None and model.hidden_size % heads:
        problems.add(
            "model.num_attention_heads",
            f"model.num_attention_heads={heads}: expected a divisor of model.hidden_size={model.hidden_size}; "
            f"the nearest is {_nearest_divisor(model.hidden_size, heads)}, or give model.head_dim",
        )
    elif (head_dim or model.hidden_size // heads) % 2:
        odd = head_dim or model.hidden_size // heads
        given = "" if head_dim else f" (model.hidden_size / {heads} heads)"
        problems.add(
            "model.head_dim",
            f"model.head_dim={odd}{given}: expected an even number, since {model.position_embedding} rotates pairs; "
            f"the nearest is {odd + 1}",
        )


def _check_vocabulary(job: JobConfig, problems: Problems) -> None:
    size = job.model.vocab_size
    if size is not None and job.data.tokenizer == "bytes" and size < BYTE_IDS:
        problems.add(
            "model.vocab_size",
            f"model.vocab_size={size}: expected at least {BYTE_IDS}, the ids of data.tokenizer=bytes; "
            "null takes the tokenizer's own",
        )


def _check_attention(job: JobConfig, problems: Problems) -> None:
    if problems.about("attention", "data.context_length"):
        return
    specs = collect_specs(job.attention, job.data.context_length, problems)
    if problems.about("attention"):
        return
    if not problems.about("model.num_hidden_layers"):
        _check_reach(job, specs[: job.model.num_hidden_layers], problems)
    levels = max((len(s["segment_lengths"]) for s in specs if s.get("heads") == "grouped"), default=0)
    heads = job.model.num_attention_heads
    known = job.model.pretrained is None and not problems.about("model.num_attention_heads")
    if known and heads < levels:
        problems.add(
            "attention.dilated.heads",
            f"attention.dilated.heads=grouped: expected a head for each of the {levels} levels, but "
            f"model.num_attention_heads={heads}; use heads=all or at most {heads} levels",
        )


def _check_reach(job: JobConfig, specs: list[dict[str, Any]], problems: Problems) -> None:
    # Other blocks, and segments shifted against each other, carry information over a segment's border.
    if any(spec["name"] != "dilated" for spec in specs) or len({spec["shift"] for spec in specs}) > 1:
        return
    widest = max(specs, key=lambda spec: max(spec["segment_lengths"]))
    reach, context = max(widest["segment_lengths"]), job.data.context_length
    if reach < context:
        # The keys per query stay the same when the rate grows with the segment.
        rate = math.ceil(widest["dilation_rates"][-1] * context / reach)
        problems.add(
            "attention.dilated.segment_lengths",
            f"attention.dilated.segment_lengths={widest['segment_lengths']}: the pattern reaches {reach} positions, "
            f"but data.context_length={context}, and nothing would ever cross a border; add the level {context} with "
            f"dilation rate {rate}, or leave both lists null, or use data.context_length={reach}",
        )


def _check_checkpointing(job: JobConfig, problems: Problems) -> None:
    every, layers = job.trainer.activation_checkpointing.every, job.model.num_hidden_layers
    if job.model.pretrained or problems.about("trainer.activation_checkpointing", "model.num_hidden_layers"):
        return
    if job.trainer.activation_checkpointing.kind != "none" and every > layers:
        problems.add(
            "trainer.activation_checkpointing.every",
            f"trainer.activation_checkpointing.every={every}: no layer of model.num_hidden_layers={layers} would be "
            f"checkpointed; expected at most {layers}",
        )


def _check_memory(job: JobConfig, problems: Problems) -> None:
    if job.memory == "auto" and job.model.keep_code:
        problems.add(
            "memory",
            "memory=auto: the memory of transformers' own code (model.keep_code=true) is not known; expected "
            "memory=manual, or model.keep_code=false",
        )
    processes = job.trainer.devices * job.trainer.num_nodes
    if job.memory == "auto" and processes > 1 and not problems.about("memory", "trainer.devices", "trainer.num_nodes"):
        problems.add(
            "memory",
            f"memory=auto: with {processes} processes one would go on by another plan than the rest; expected "
            "memory=manual, with trainer.tile and trainer.activation_checkpointing as memory=auto chooses them for one",
        )


def _check_schedule(job: JobConfig, problems: Problems) -> None:
    optim, steps = job.optim, job.trainer.max_steps
    if not problems.about("optim.betas") and not (len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas)):
        problems.add(
            "optim.betas",
            f"optim.betas={show(optim.betas)}: expected two numbers, at least 0 and below 1; the usual are [0.9, 0.95]",
        )
    if problems.about("optim.warmup_steps", "optim.decay_fraction", "trainer.max_steps"):
        return
    if optim.warmup_steps and optim.warmup_steps >= steps:
        problems.add(
            "optim.warmup_steps",
            f"optim.warmup_steps={optim.warmup_steps}: expected below trainer.max_steps={steps}; "
            f"for example {steps // 10}",
        )
    elif optim.schedule == "wsd" and optim.warmup_steps + optim.decay_fraction * steps > steps:
        largest = math.floor((1 - optim.warmup_steps / steps) * 100) / 100
        problems.add(
            "optim.decay_fraction",
            f"optim.decay_fraction={optim.decay_fraction}: with optim.warmup_steps={optim.warmup_steps} of "
            f"trainer.max_steps={steps} the rate would fall before it has risen; expected at most {largest}",
        )


def _check_tokens_per_step(job: JobConfig, problems: Problems) -> None:
    trainer, wanted = job.trainer, job.trainer.tokens_per_step
    parts = ("tokens_per_step", "accumulate", "devices", "num_nodes")
    if wanted is None or problems.about("data.context_length", "data.batch_size", *(f"trainer.{p}" for p in parts)):
        return
    # Processes that share a sequence read the same rows.
    readers = max(1, trainer.devices * trainer.num_nodes // max(1, job.strategy.sequence_parallel_size))
    row_tokens = job.data.context_length * readers
    if row_tokens * job.data.batch_size * trainer.accumulate == wanted:
        return
    rows = max(1, round(wanted / row_tokens))
    # The batch size stays where it can: memory was chosen with it.
    batch = _nearest_divisor(rows, min(job.data.batch_size, rows))
    exactly = "" if rows * row_tokens == wanted else f" gives {rows * row_tokens}, the nearest"
    problems.add(
        "trainer.tokens_per_step",
        f"trainer.tokens_per_step={wanted}: context_length {job.data.context_length} x batch_size "
        f"{job.data.batch_size} x accumulate {trainer.accumulate} x {readers} process(es) "
        f"is {row_tokens * job.data.batch_size * trainer.accumulate}; "
        f"data.batch_size={batch} trainer.accumulate={rows // batch}{exactly or ' gives it'}",
    )


def _check_accelerator(job: JobConfig, problems: Problems, machine: Machine) -> None:
    trainer = job.trainer
    if problems.about("trainer.accelerator", "trainer.devices", "trainer.precision"):
        return
    on_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and machine.gpus == 0)
    if trainer.accelerator == "gpu" and machine.gpus == 0:
        problems.add(
            "trainer.accelerator",
            "trainer.accelerator=gpu: this machine shows no GPU; expected a GPU and its driver, "
            "or trainer.accelerator=cpu or auto",
        )
    elif trainer.accelerator in ("auto", "gpu") and machine.gpus and trainer.devices > machine.gpus:
        problems.add(
            "trainer.devices",
            f"trainer.devices={trainer.devices}: this machine has {machine.gpus} GPU(s); "
            f"expected at most {machine.gpus}",
        )
    if on_cpu and trainer.precision == "fp16":
        problems.add(
            "trainer.precision",
            "trainer.precision=fp16: the CPU cannot train in it; expected bf16 or fp32 there, or a GPU",
        )


def _check_processes(job: JobConfig, problems: Problems, machine: Machine) -> None:
    trainer = job.trainer
    if problems.about("trainer.devices", "trainer.num_nodes", "strategy.name"):
        return
    devices, nodes = trainer.devices, trainer.num_nodes
    if machine.world_size is not None and machine.world_size != devices * nodes:
        local = machine.local_world_size or machine.world_size
        problems.add(
            "trainer.devices",
            f"trainer.devices={devices} trainer.num_nodes={nodes}: the launcher started {machine.world_size} "
            f"process(es); expected trainer.devices={local} trainer.num_nodes={machine.world_size // local}",
        )
    elif nodes > 1 and not machine.multi_node_launcher:
        problems.add(
            "trainer.num_nodes",
            f"trainer.num_nodes={nodes}: nothing has started this job on {nodes} machines; expected, on each of them, "
            f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "train.py ...",
        )
    if devices * nodes > 1 and job.strategy.name == "auto":
        problems.add(
            "strategy.name",
            f"strategy.name=auto: {devices * nodes} processes (trainer.devices={devices} trainer.num_nodes={nodes}) "
            "need a strategy; expected strategy=ddp, or sequence_parallel to share each sequence",
        )


def _check_run(job: JobConfig, problems: Problems) -> None:
    name = job.run.name
    if not problems.about("run.name") and not is_run_name(name):
        problems.add(
            "run.name",
            f"run.name={show(name)}: expected the name of one directory in run.root, of letters, digits and "
            f"._=+,@-, at most {LONGEST_NAME} bytes; for example {as_run_name(name) or 'my-run'}",
        )
    root = Path(job.run.root or ".")
    blocker = next((path for path in (root, *root.parents) if os.path.exists(path)), root)
    if not problems.about("run.root") and (not job.run.root.strip() or not os.path.isdir(blocker)):
        what = f"{blocker} is a file" if job.run.root.strip() else "it is empty"
        problems.add("run.root", f"run.root={show(job.run.root)}: {what}; expected a directory, for example runs")
    if job.resume not in ("auto", "never") and not problems.about("resume") and not os.path.exists(job.resume):
        problems.add(
            "resume",
            f"resume={show(job.resume)}: no such file or directory; expected auto, never, a run's directory or one of "
            "its checkpoints",
        )


def _check_loggers(job: JobConfig, problems: Problems) -> None:
    for name in ("wandb", "tensorboard"):
        if getattr(job.logger, name) and not problems.about(f"logger.{name}") and find_spec(name) is None:
            problems.add(
                f"logger.{name}",
                f"logger.{name}=true: the package {name} is not installed; expected pip install {name}, or logger=csv",
            )


def _nearest_divisor(number: int, near: int) -> int:
    near = min(near, number)
    candidates = (n for distance in range(SEARCHED) for n in (near - distance, near + distance))
    return next((n for n in candidates if 0 < n <= number and number % n == 0), 1)


def _check_evaluation(job: JobConfig, problems: Problems) -> None:
    check_evaluation(job.evaluation, problems, "evaluation.")
    if not job.evaluation.every or problems.about("evaluation.every"):
        return
    if job.strategy.name.startswith("sequence_parallel"):
        problems.add(
            "evaluation.every",
            f"evaluation.every={job.evaluation.every}: strategy={job.strategy.name} spreads a sequence over processes "
            "while training; expected 0, and scripts/evaluate.py afterwards",
        )
    if job.model.keep_code:
        problems.add(
            "evaluation.every",
            f"evaluation.every={job.evaluation.every}: model.keep_code=true has no bounded cache to read with; "
            "expected 0, or model.keep_code=false",
        )
