"""What saving costs a training job: the time of a step with asynchronous and with plain saving, against none at all.

    python scripts/benchmark_saving.py model=125m data.context_length=8192 --save-every 50

Trains the job that the overrides name, again and again, the three ways in turn, in a directory that is removed. What is
timed is the real job, its callbacks and its guard included, from half an interval of saving to half an interval after
the last save, so that each save has the steps behind it that it has in a long run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from rich import box
from rich.console import Console
from rich.table import Table

from longnet.config.arguments import script
from longnet.config.cli import compose_job
from longnet.config.schema import JobConfig
from longnet.training.module import LongNetModule
from longnet.training.run import train
from longnet.training.throughput import synchronize

CONF = Path(__file__).parents[1] / "conf"
WAYS: dict[str, dict[str, Any]] = {"none": {}, "asynchronous": {"save_async": True}, "plain": {"save_async": False}}


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    arguments, overrides = parse_arguments(words)
    every, saves = arguments.save_every, arguments.saves
    job = compose_job(CONF, [*overrides, "callbacks=quiet", "run.name=benchmark"])
    job.trainer.max_steps = every * (saves + 1)
    job.trainer.val_every = 10 * job.trainer.max_steps
    rounds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, options in WAYS.items():
            interval = every if options else 10 * job.trainer.max_steps
            with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
                callbacks = replace(job.callbacks, save_every=interval, **options)
                run = replace(job.run, root=root)
                times = time_steps(replace(job, callbacks=callbacks, run=run), every // 2, every // 2 + every * saves)
            rounds[way].append(times)
    show(rounds, saves, every)


def time_steps(job: JobConfig, first: int, last: int) -> list[float]:
    """Seconds from the beginning of each step to that of the next, the device waited for at both ends."""
    moments: list[float] = []
    training_step = LongNetModule.training_step

    def timed(module: LongNetModule, batch: dict[str, Any]) -> None:
        if module.global_step in (first, last):
            synchronize(module.device)
        if first <= module.global_step <= last:
            moments.append(time.perf_counter())
        training_step(module, batch)

    with patch.object(LongNetModule, "training_step", timed):
        train(job)
    return [after - before for before, after in pairwise(moments)]


def show(rounds: dict[str, list[list[float]]], saves: int, every: int) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("saving")
    for title in ("step, ms", "ratio", "total, s", "ratio", "s a save"):
        table.add_column(title, justify="right")
    # Of the rounds the fastest, which the least else has disturbed; each holds all of its saves.
    best = {way: min(times, key=sum) for way, times in rounds.items()}
    typical, whole = median(best["none"]), sum(best["none"])
    for way in WAYS:
        step, total = median(best[way]), sum(best[way])
        table.add_row(
            way, f"{1e3 * step:.1f}", f"{step / typical:.3f}", f"{total:.2f}", f"{total / whole:.3f}",
            f"{(total - whole) / saves:.3f}",
        )  # fmt: skip
    Console().print(
        table, f"{saves} saves, one every {every} steps; totals of the best of {len(rounds['none'])} rounds"
    )


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-every", type=int, default=50, help="steps from save to save")
    parser.add_argument("--saves", type=int, default=3, help="of one job")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each way")
    parser.add_argument("--folder", help="where the checkpoints go for the while; on the disk that is to be measured")
    return parser.parse_known_args(words)


if __name__ == "__main__":
    main()
