"""What a job is about to do, in a few lines."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from longnet.data import Corpus
from longnet.model import LongNetForCausalLM
from longnet.model.hf.interface import pattern_of

from .environment import cpu_model
from .progress import quantity
from .session import Session


def describe_session(session: Session) -> dict[str, str]:
    """The facts for the header, by name."""
    data, model, trainer = session.data, session.module.model, session.job.trainer
    shape, context = model.config.get_text_config(), data.corpus.train.context_length
    rows = data.rows_per_step
    epochs = f", {trainer.max_steps * rows / data.train_rows:.2g} epochs" if data.train_rows else ""
    resumed = f", going on from step {session.start_step:,}" if session.start_step else ""
    return {
        "run": f"{session.run.path}{resumed}",
        "device": _device(session),
        "model": f"{_parameters(model)}, {shape.num_hidden_layers} layers of "
        f"{shape.hidden_size}, {shape.num_attention_heads} heads",
        "attention": _attention(model),
        "data": _data(data.corpus),
        **_processes(session),
        "step": f"{rows} row{'s' if rows > 1 else ''} of {context:,} tokens = {rows * context:,}",
        "steps": f"{trainer.max_steps:,}, {quantity(trainer.max_steps * rows * context)} tokens{epochs}",
    }


def _parameters(model: PreTrainedModel) -> str:
    total, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    return f"{quantity(total)} parameters" + (f" ({quantity(trained)} trained)" if trained < total else "")


def _data(corpus: Corpus) -> str:
    held_out = f"{corpus.num_bytes['validation'] / 1e6:.1f} MB held out"
    if "train" in corpus.num_bytes:
        amount = f"{corpus.num_bytes['train'] / 1e6:.1f} MB to train"
    else:
        amount = "a stream" if corpus.is_stream else f"{corpus.documents['train']:,} samples to train"
    return ", ".join([corpus.source, amount, held_out, *([corpus.skipped] if corpus.skipped else [])])


def _device(session: Session) -> str:
    placement = session.placement
    if placement.accelerator == "cuda":
        name = torch.cuda.get_device_name()
    elif placement.accelerator == "mps":
        name = "Apple GPU"
    else:
        threads = torch.get_num_threads()
        name = f"CPU {cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
    processes = session.job.trainer.devices * session.job.trainer.num_nodes
    count = f"{processes} x " if processes > 1 else ""
    return f"{count}{name}, {placement.precision_name}{', compiled' if placement.compile else ''}"


def _processes(session: Session) -> dict[str, str]:
    """How the processes share the work; nothing for one, or for copies that each read their own rows."""
    strategy, readers = session.job.strategy, session.data.data_world
    size = strategy.sequence_parallel_size
    if size == 1:
        return {}
    weights = ", weights sharded" if strategy.name == "sequence_parallel_fsdp" else ""
    return {"mesh": f"{readers} data x {size} sequence by {strategy.sequence_parallel}{weights}"}


def _attention(model: PreTrainedModel) -> str:
    if not isinstance(model, LongNetForCausalLM):
        return f"{pattern_of(model.config)} in {type(model).__name__}"
    # The specs are cycled over the depth, so the first layers have one of each.
    blocks = []
    for spec, layer in zip(model.config.attention or [], model.model.layers, strict=False):
        details = "" if spec["name"] == "dense" else layer.self_attn.block.extra_repr()
        blocks.append(f"{spec['name']} {details}".rstrip())
    return "; ".join(blocks)
