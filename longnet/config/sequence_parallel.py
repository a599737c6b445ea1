"""What sequence parallelism needs of the other keys."""

from __future__ import annotations

from .attention import ON_OWN_OPERATOR
from .schema import JobConfig
from .typed import Problems

NAMES = ("sequence_parallel", "sequence_parallel_fsdp")


def check_sequence_parallel(job: JobConfig, problems: Problems) -> None:
    """Reports whatever would keep processes from sharing a sequence."""
    strategy, size = job.strategy, job.strategy.sequence_parallel_size
    key = "strategy.sequence_parallel_size"
    if problems.about("strategy", "trainer.devices", "trainer.num_nodes"):
        return
    world = job.trainer.devices * job.trainer.num_nodes
    if strategy.name not in NAMES:
        if size > 1:
            problems.add(
                key,
                f"{key}={size}: strategy.name={strategy.name} shares no sequence; expected strategy=sequence_parallel, "
                "or 1",
            )
        return
    if world % size:
        nearest = min((n for n in range(1, world + 1) if world % n == 0), key=lambda n: abs(n - size))
        problems.add(
            key,
            f"{key}={size}: expected a divisor of the {world} process(es) (trainer.devices={job.trainer.devices} "
            f"trainer.num_nodes={job.trainer.num_nodes}); the nearest is {nearest}",
        )
    elif size > 1:
        _check_model(job, problems)
    if strategy.name == "sequence_parallel_fsdp" and world > 1:
        _check_sharding(job, problems)


def _check_sharding(job: JobConfig, problems: Problems) -> None:
    if job.trainer.precision == "fp16":
        problems.add(
            "trainer.precision",
            "trainer.precision=fp16: its loss scale is not shared between processes with sharded weights; "
            "expected bf16, fp32, or strategy=sequence_parallel",
        )
    if job.model.keep_code and not problems.about("model.keep_code"):
        problems.add(
            "model.keep_code",
            "model.keep_code=true: only a LongNet's weights are sharded; expected false, or strategy=ddp",
        )


def _check_model(job: JobConfig, problems: Problems) -> None:
    size, form, key = (
        job.strategy.sequence_parallel_size,
        job.strategy.sequence_parallel,
        "strategy.sequence_parallel_size",
    )
    context, heads = job.data.context_length, job.model.num_attention_heads
    if context < size and not problems.about("data.context_length"):
        problems.add(
            key, f"{key}={size}: data.context_length={context} has no position for each; expected at most {context}"
        )
    if form == "ulysses" and heads < size and not problems.about("model.num_attention_heads"):
        problems.add(
            key,
            f"{key}={size}: strategy.sequence_parallel=ulysses gives each process heads of its own, and "
            f"model.num_attention_heads={heads}; expected at most {heads}, or gather or ring",
        )
    # Each of these cuts the rows in a way of its own, or has attention that is not ours to share out.
    for name, value, wanted in (
        ("data.packing", job.data.packing, job.data.packing == "concat"),
        ("finetune.context_growth", job.finetune.context_growth, not job.finetune.context_growth),
        ("model.keep_code", job.model.keep_code, not job.model.keep_code),
    ):
        if not wanted:
            instead = {"data.packing": "concat", "finetune.context_growth": "[]", "model.keep_code": "false"}
            problems.add(
                name,
                f"{name}={value}: not with a sequence shared by {size} processes; expected {instead[name]}, or "
                "strategy=ddp",
            )
    if problems.about("attention"):
        return
    names = [entry if isinstance(entry, str) else entry.get("name") for entry in job.attention.layers]
    if others := sorted({str(name) for name in names} - set(ON_OWN_OPERATOR)):
        problems.add(
            "attention.layers",
            f"attention.layers={job.attention.layers}: {', '.join(others)} cannot attend over several processes; "
            f"expected {' or '.join(ON_OWN_OPERATOR)}, or strategy=ddp",
        )
    if job.attention.backend == "reference":
        problems.add(
            "attention.backend",
            "attention.backend=reference: it is made for one process; expected auto or sdpa with "
            f"strategy={job.strategy.name}",
        )
