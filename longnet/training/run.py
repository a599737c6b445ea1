"""A training job from a checked config to a finished run."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from safetensors import SafetensorError

from longnet.checkpoint import Contents
from longnet.config.errors import JobError
from longnet.config.machine import is_first_process
from longnet.config.schema import DataConfig, JobConfig
from longnet.data import Corpus, build_corpus
from longnet.data.pretrained import ensure_checkpoint
from longnet.evaluation.baselines import Baselines, measure_baselines
from longnet.model import LongNetForCausalLM

from . import activation_checkpointing
from .checkpoints import Checkpoints, DirectoryCheckpointIO, checkpoint_step
from .datamodule import TextDataModule
from .environment import describe_environment
from .evaluation import Evaluations
from .finetune import choose_trained, merge_adapters
from .growth import ContextGrowth
from .guard import Guard, LossSpikeError
from .header import describe_session
from .interrupt import Interrupts
from .loggers import build_loggers, close_loggers, log_config
from .memory import MemoryKeeper
from .metrics import MetricsFile, read_metrics
from .module import LongNetModule
from .placement import Placement, place
from .pretrained import load_pretrained, new_config
from .progress import build_progress, show_header
from .quiet import quiet_libraries
from .recorder import Recorder
from .report import generate_sample, plot_loss, show_summary
from .rundir import RunDirectory, config_hash
from .session import Session
from .strategy import answers_in_time, build_strategy, gather_weights
from .throughput import TrainingClock, training_flops_per_token

# Training bytes that the baselines look at.
BASELINE_BYTES = 64 * 2**20


def train(job: JobConfig) -> None:
    """Trains a model as ``job`` says, or goes on with the run of that name, and reports on it.

    Every process of a distributed job calls this; the first one owns the run's directory and the screen.

    Raises:
        ValueError: for what the user can mend, with what to change. Unless the run had begun, nothing is left behind.
    """
    quiet_libraries()
    session = build_session(job)
    run, console = session.run, session.console
    first = is_first_process()
    if session.checkpoint and session.start_step >= job.trainer.max_steps:
        if first:
            show_finished(session)
        return

    if job.callbacks.progress != "none":
        show_header(console, "LongNet", describe_session(session))
    try:
        if first:
            run.open(job, describe_environment() | {"data": session.data.corpus.facts()})
        session = fit_to_the_end(session)
        if first:
            finish(session)
    except BaseException as error:
        run.close(failed=True)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            step = checkpoint_step(run.last) if run.last else session.start_step
            console.print(f"stopped; the same command goes on from step {step}")
        if _is_about_the_disk(error):
            raise JobError(f"{run.path} cannot be written ({error}): make room; the same command goes on") from error
        raise
    run.close()


def build_session(job: JobConfig) -> Session:
    """Builds everything the job needs, the cheap and likely refusals first. Writes nothing."""
    first = is_first_process()
    placement = place(job.trainer)
    run = RunDirectory(job.run.root, job.run.name)
    if first:
        run.check_writable()
    console = Console(quiet=not first)
    checkpoint = run.find_start(job, _warner(console)) if first else run.checkpoint_for(job.resume)
    start_step = checkpoint_step(checkpoint) if checkpoint else 0

    if placement.accelerator == "cuda":
        torch.set_float32_matmul_precision("high")
    seed_everything(job.seed, verbose=False)
    if job.model.pretrained:
        # Before the corpus, which may be tokenized by the checkpoint's own tokenizer.
        ensure_checkpoint(job.model.pretrained)
    corpus = build_corpus(**_corpus_options(job.data), seed=job.seed)
    if checkpoint and first:
        run.check_same_data(checkpoint, corpus.fingerprint)
    if placement.compile:
        # The jobs of a sweep share a process; what one has compiled must not use up the next one's share.
        torch.compiler.reset()
    module = build_module(job, corpus, placement)
    stages = [(int(context), share) for context, share in job.finetune.context_growth]
    data = TextDataModule(
        corpus,
        batch_size=job.data.batch_size,
        accumulate=job.trainer.accumulate,
        seed=job.seed,
        num_workers=job.data.num_workers,
        val_batches=job.trainer.val_batches,
        overfit_batches=job.trainer.overfit_batches,
        data_world=job.trainer.devices * job.trainer.num_nodes // job.strategy.sequence_parallel_size,
        growth=ContextGrowth(stages, job.trainer.max_steps),
    )
    return Session(job, placement, run, console, module, data, checkpoint, start_step)


def build_module(job: JobConfig, corpus: Corpus, placement: Placement) -> LongNetModule:
    """The model, freshly initialised or from its checkpoint, and how it is trained."""
    model = load_pretrained(job, corpus.tokenizer) if job.model.pretrained else _new_model(job, corpus)
    choose_trained(model, job.finetune)
    recompute = job.trainer.activation_checkpointing
    if isinstance(model, LongNetForCausalLM):
        if placement.precision_name == "bf16" and job.trainer.residual == "bf16":
            model.model.residual_dtype = torch.bfloat16
        activation_checkpointing.apply(model, recompute.kind, recompute.every, job.trainer.tile, placement.compile)
    else:
        activation_checkpointing.apply_to_decoder(model, recompute.kind, placement.compile)
    return LongNetModule(model, job.optim, job.trainer.max_steps, job.data.batch_size, job.seed)


def _new_model(job: JobConfig, corpus: Corpus) -> LongNetForCausalLM:
    config = new_config(
        job, corpus.vocab_size, pad_token_id=corpus.tokenizer.pad_id, eos_token_id=corpus.tokenizer.eos_id
    )
    if config.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.vocab_size}: expected at least {corpus.vocab_size}, the ids of the tokenizer "
            f"{corpus.tokenizer.name}; null takes the tokenizer's own"
        )
    return LongNetForCausalLM(config)


def fit_to_the_end(session: Session) -> Session:
    """Trains to the last step; where the loss jumps, goes back to the last checkpoint and on with other data.

    Returns:
        The same, with the module that was trained.
    """
    job = session.job
    for rewinds in count(1):
        try:
            fit(session)
            return session
        except LossSpikeError as spike:
            if rewinds > job.trainer.guard.rewinds:
                raise JobError(f"{spike}, and trainer.guard.rewinds={job.trainer.guard.rewinds} are spent") from spike
            checkpoint, start = _choose_return(session)
            session.data.leave_out(start, spike.step - start)
            _warner(session.console)(f"WARNING: {spike}; going back to step {start}, and on without that data")
        # Weights that were sharded cannot be loaded again as they are.
        module = build_module(job, session.data.corpus, session.placement)
        session = replace(session, module=module, checkpoint=checkpoint, start_step=start)
    raise AssertionError("count has no end")


def _choose_return(session: Session) -> tuple[Path | None, int]:
    """The last checkpoint and its step; where the run has none of its own yet, the one that it began with.

    The first process chooses for all: it alone has waited until what it was writing beside training was written.
    """
    choice: list[Any] = [None, 0]
    if is_first_process():
        checkpoint = session.run.checkpoint_for("auto", _warner(session.console)) or session.checkpoint
        choice = [checkpoint, checkpoint_step(checkpoint) if checkpoint else 0]
    if dist.is_initialized():
        with answers_in_time(session.job.strategy.timeout):
            dist.broadcast_object_list(choice)
    return choice[0], choice[1]


def fit(session: Session) -> None:
    """Trains to the last step."""
    job, run, module, console = session.job, session.run, session.module, session.console
    earlier = [row for row in read_metrics(run.metrics) if row["step"] <= session.start_step]
    best = min((loss for row in earlier if isfinite(loss := row.get("val/loss", inf))), default=inf)
    progress = build_progress(job.callbacks.progress, console, best)
    clock = TrainingClock()
    warn = _warner(console)
    loggers = build_loggers(job.logger, run, session.data.corpus.weights, warn)
    contexts = [None, *(size for size, _ in session.data.growth.stages)]
    flops = {size: training_flops_per_token(module.model, size or job.data.context_length) for size in contexts}
    flush = next(logger.flush for logger in loggers if isinstance(logger, MetricsFile))
    io = DirectoryCheckpointIO(job.callbacks.keep_last, job.callbacks.save_async, job.strategy.timeout, warn, flush)
    checkpoints = Checkpoints(run.checkpoints, io, job.callbacks.save_every, config_hash(job), clock)
    interrupts = Interrupts(checkpoints, console)
    # The order matters: a step is recorded before it is saved, so a resumed run finds its row.
    callbacks: list[Callback] = [
        *([MemoryKeeper(job, session.placement, console)] if isinstance(module.model, LongNetForCausalLM) else []),
        *([progress] if progress else []),
        Guard(job.trainer.guard, session.data, warn),
        Recorder(
            job.trainer.log_every,
            flops,
            session.placement.matmul_dtype,
            clock,
            session.data,
            listeners=[progress.on_row] if progress else [],
        ),
        *([Evaluations(job.evaluation, session.data.corpus, run, clock, console)] if job.evaluation.every else []),
        checkpoints,
        interrupts,
    ]
    profiler = SimpleProfiler() if job.trainer.profiler == "simple" else None
    try:
        log_config(loggers, asdict(job))
        trainer = build_trainer(session, callbacks, loggers, io, profiler)
        with answers_in_time(job.strategy.timeout):
            trainer.fit(module, datamodule=session.data, ckpt_path=session.checkpoint, weights_only=True)
            gather_weights(module, trainer.strategy, job.finetune)
    finally:
        interrupts.restore()
        close_loggers(loggers)
    if profiler is not None:
        console.print(profiler.summary(), highlight=False, soft_wrap=True)


def build_trainer(
    session: Session,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
    checkpoint_io: DirectoryCheckpointIO,
    profiler: SimpleProfiler | None,
) -> Trainer:
    """Lightning's trainer, with everything it would add of its own turned off."""
    trainer = session.job.trainer
    return Trainer(
        accelerator=session.placement.accelerator,
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=build_strategy(session.job),
        precision=session.placement.precision,
        max_steps=trainer.max_steps,
        val_check_interval=trainer.val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=list(loggers),
        plugins=[checkpoint_io],
        default_root_dir=session.run.path,
        profiler=profiler,
        # Rows are dealt out by step and rank; Lightning's sampler would deal them out again.
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def finish(session: Session) -> None:
    """Leaves the weights, the plot and a sample in the run's directory, and shows how it went."""
    run, options, corpus, model = session.run, session.job.callbacks, session.data.corpus, session.module.model
    merge_adapters(model, session.job.finetune, run.adapter)
    model.save_pretrained(run.model)
    corpus.tokenizer.to_transformers(corpus.train.context_length).save_pretrained(run.model)

    baselines = sample = None
    if options.summary:
        baselines = _measure_baselines(session.data)
    if options.plot:
        plot_loss(run.metrics, run.plot, run.name, baselines)
    if not options.summary:
        return
    if options.sample_tokens:
        session.module.to(session.placement.accelerator)
        # Each new token is another length: compiling for it would take longer than computing it.
        with torch.compiler.set_stance("force_eager"):
            sample = generate_sample(
                model, corpus.tokenizer, options.sample_prompt, options.sample_tokens, session.job.seed
            )
        run.sample.write_text(sample)
    show_summary(session.console, run, baselines, sample)


def _is_about_the_disk(error: BaseException) -> bool:
    if isinstance(error, SafetensorError):
        # It has no number, only words, which are the system's.
        return "I/O error" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _warner(console: Console) -> Callable[[str], None]:
    def warn(text: str) -> None:
        # Where the disk is full, so may be the one that the screen goes to.
        with suppress(OSError):
            console.print(text, highlight=False, soft_wrap=True, style="bold red", markup=False)

    return warn


def _corpus_options(data: DataConfig) -> dict[str, Any]:
    """What the corpus is made of: all but how it is dealt out."""
    return {name: value for name, value in asdict(data).items() if name not in ("batch_size", "num_workers")}


def _measure_baselines(data: TextDataModule) -> Baselines | None:
    corpus = data.corpus
    # What xz can refer back to is enough to know how common each byte is, and a corpus may be larger than memory.
    content = (
        b""
        if data.train_rows is None
        else corpus.content("train", min(data.train_rows, -(-BASELINE_BYTES // corpus.train.context_length)))
    )
    validation = data.validation_content()
    return measure_baselines(validation, content) if content and validation else None


def show_finished(session: Session) -> None:
    """Says that nothing is left to train, and shows again how the run went."""
    run, checkpoint, limit = session.run, session.checkpoint, session.job.trainer.max_steps
    assert checkpoint is not None
    message = (
        f"{checkpoint} is at step {session.start_step} of trainer.max_steps={limit}: nothing is left to train; raise "
        "trainer.max_steps to go on"
    )
    if not run.config.exists():
        raise ValueError(message)
    session.console.print(message, soft_wrap=True, highlight=False)
    with Contents(checkpoint) as contents:
        session.module.load_state_dict(contents.get("state_dict"))
    finish(session)
