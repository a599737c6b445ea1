"""Throws faults at small training jobs for a while, and counts what they cost: it must be nothing but time.

    python scripts/chaos.py --minutes 30
    mount -t tmpfs -o size=48m tmpfs DIR && python scripts/chaos.py --folder DIR    # with a disk that fills up
    python scripts/chaos.py --folder DIR --faults "full disk" "kill -9"             # with these faults alone

Each job is first trained without a fault. Then it is trained again and again, in processes that are killed, signalled
and robbed of their disk, and whose checkpoints are damaged, at random moments, and restarted until it has come to its
end. Its losses, its tokens and its weights must then be those of the first run, bit for bit. A run of which they are
not is kept, and said with its faults and the rows that differ.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longnet.checkpoint import bring_back, newest_good, read_manifest, steps_of
from longnet.config import JobConfig
from longnet.training.metrics import read_metrics

SAVE_EVERY, VAL_EVERY, STEPS = 4, 5, 40
# Columns that depend on the clock.
MEASURED = ("tokens_per_second", "data_wait", "mfu", "peak_memory_gib", "seconds")
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "Ctrl-C": signal.SIGINT}
KILLS = ("kill -9", "kill -9 in a save", "kill -9 in a validation")
FULL_DISKS = ("full disk", "kill -9 on a full disk")
DAMAGES = ("flipped byte", "truncated file", "missing file", "other version")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process, worker, stream": {"data.streaming": True, "data.packing": "isolate", "data.num_workers": 1},
    "2 processes, accumulated": {
        "trainer.devices": 2, "strategy.name": "ddp", "trainer.accumulate": 2, "callbacks.save_async": True,
    },
    "2 processes, sharded": {"trainer.devices": 2, "strategy.name": "sequence_parallel_fsdp"},
}  # fmt: skip


@dataclass
class Tally:
    """What one kind of fault has done."""

    injected: int = 0
    lost: int = 0
    ends: Counter[str] = field(default_factory=Counter)


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    draw = random.Random(arguments.seed)
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="chaos-")).resolve()
    # What processes say and what is kept: not on the disk that is to be full.
    aside = Path(tempfile.mkdtemp(prefix="chaos-aside-"))
    corpus = write_corpus(folder / "corpus", draw)
    small_disk = shutil.disk_usage(folder).total < 256 * 2**20
    kinds = arguments.faults or [*KILLS, *SIGNALS, *DAMAGES, *(FULL_DISKS if small_disk else ())]
    if not small_disk and set(kinds) & set(FULL_DISKS):
        raise SystemExit(f"--folder {folder} is on a disk too large to be filled: mount a small one")
    tallies: dict[str, Tally] = defaultdict(Tally)
    runs: Counter[str] = Counter()
    wrong: list[str] = []

    references = {}
    for name in LAYOUTS:
        job = build_job(folder, corpus, name, f"reference-{list(LAYOUTS).index(name)}")
        with Job(job, aside) as running:
            if running.wait() != 0:
                raise SystemExit(f"{name} does not even train undisturbed:\n{running.said()}")
        references[name] = outcome(job)
    start, rounds = time.monotonic(), 0
    while time.monotonic() - start < 60 * arguments.minutes:
        name = list(LAYOUTS)[rounds % len(LAYOUTS)]
        job = build_job(folder, corpus, name, f"storm-{rounds}")
        rounds += 1
        faults: list[str] = []
        wrong += storm(job, tallies, draw, kinds, faults, aside)
        differing = compare(outcome(job), references[name])
        runs["finished"] += 1
        runs["exact"] += not differing
        runs["rows"] += sum(line.startswith("step") for line in differing)
        if differing:
            kept = shutil.copytree(run_path(job), aside / job.run.name)
            wrong.append("\n".join([f"{kept} ({name}) is not exact:", *differing, "after:", *faults]))
            print(wrong[-1], flush=True)
        shutil.rmtree(run_path(job))
    show(console, tallies, runs, (time.monotonic() - start) / 60, wrong)
    if not arguments.folder:
        shutil.rmtree(folder)
    if not wrong:
        shutil.rmtree(aside)
    return int(runs["exact"] != runs["finished"] or bool(wrong))


def storm(
    job: JobConfig, tallies: dict[str, Tally], draw: random.Random, kinds: Sequence[str], told: list[str], aside: Path
) -> list[str]:
    """Trains a job to its end through one fault after the other; what should not have happened.

    Args:
        job: the job.
        tallies: counts the faults of each kind.
        draw: the lot.
        kinds: the faults to choose from.
        told: gets a line for each fault.
        aside: for what the processes say.
    """
    problems: list[str] = []
    for faults in range(1000):
        kind = draw.choice(kinds)
        # So that a run comes to an end.
        calm = faults >= 8
        with Job(job, aside) as running:
            hit = not calm and running.reaches(kind, draw)
            begun = time.monotonic()
            if hit:
                inject(kind, running, draw)
            code = running.wait()
            (running.root / "ballast").unlink(missing_ok=True)
            if not hit and code == 0:
                return problems
            said = running.said()
        step = max((int(row["step"]) for row in read_metrics(run_path(job) / "metrics.csv")), default=0)
        if kind in DAMAGES and hit:
            damage(kind, run_path(job) / "checkpoints", draw)
        # A data worker that was handing over a batch when its job was killed says so, in Python's own words.
        if ("Traceback" in said and "resource_sharer" not in said) or not hit:
            problems.append(f"{kind}: exit code {code}\n{said[-2000:]}")
            if len(problems) > 3:
                return problems
        if hit:
            checkpoints = run_path(job) / "checkpoints"
            bring_back(checkpoints)
            good = newest_good(checkpoints, lambda text: None) if steps_of(checkpoints) else None
            tally = tallies[kind]
            tally.injected += 1
            tally.ends[str(code)] += 1
            seconds = time.monotonic() - begun
            told.append(f"{kind} at step {step}, exit code {code} after {seconds:.1f} s, good: {good and good.name}")
            print(f"{job.run.name}: {told[-1]}", flush=True)
            tally.lost = max(tally.lost, step - (read_manifest(good).step if good else 0))
            if code == 0:
                return problems
    raise AssertionError("a storm of 1000 faults")


def inject(kind: str, running: Job, draw: random.Random) -> None:
    """Brings the fault on one of the processes, chosen by lot."""
    if kind in SIGNALS:
        running.send(draw.choice(running.processes), SIGNALS[kind])
    elif kind in FULL_DISKS:
        ballast = running.root / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        # Said of a checkpoint, or also of a row.
        wanted = "could not be written" if kind == "full disk" else "be written"
        deadline = time.monotonic() + 20
        while running.alive() and wanted not in running.said() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        if kind == "full disk":
            ballast.unlink(missing_ok=True)
            return
        if draw.random() < 0.5:
            # Just as there is room again.
            ballast.unlink(missing_ok=True)
            time.sleep(draw.random() * 0.1)
        running.send(draw.choice(running.processes), signal.SIGKILL)
    else:
        running.send(draw.choice(running.processes), signal.SIGKILL)


def damage(kind: str, folder: Path, draw: random.Random) -> None:
    """Damages the newest checkpoint, if it is not the only one."""
    checkpoints = steps_of(folder)
    if len(checkpoints) < 2:
        return
    file = draw.choice(sorted(checkpoints[-1].iterdir()))
    content = bytearray(file.read_bytes())
    if kind == "other version":
        (checkpoints[-1] / "manifest.json").write_text('{"format": 2}')
    elif kind == "missing file":
        file.unlink()
    elif kind == "truncated file":
        file.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)


class Job:
    """The processes of a job, started; gone when it is left."""

    def __init__(self, job: JobConfig, screens: Path) -> None:
        self.root = Path(job.run.root)
        self._run = run_path(job)
        self._screens = [screens / f"{job.run.name}-{rank}.txt" for rank in range(job.trainer.devices)]
        port = random.SystemRandom().randrange(20000, 60000)
        context = multiprocessing.get_context("forkserver")
        # Imports torch once; each process is then a quick fork.
        context.set_forkserver_preload(["torch._dynamo", "longnet.training.run"])
        arguments = [(job, rank, port, screen) for rank, screen in enumerate(self._screens)]
        self.processes: list[Any] = [context.Process(target=run_process, args=args) for args in arguments]

    def __enter__(self) -> Job:
        for screen in self._screens:
            screen.unlink(missing_ok=True)
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            # With its data workers.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def said(self) -> str:
        return "".join(screen.read_text() for screen in self._screens if screen.exists())

    def send(self, process: Any, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    def reaches(self, kind: str, draw: random.Random) -> bool:
        """Waits for a moment at which to bring the fault; whether the job got that far."""
        before = len(read_metrics(self._run / "metrics.csv"))
        wanted = before + draw.randrange(1, 9)
        while self.alive():
            rows = len(read_metrics(self._run / "metrics.csv"))
            match kind:
                case "kill -9 in a save":
                    there = any((self._run / "checkpoints").glob(".tmp-*"))
                case "kill -9 in a validation":
                    # It follows upon this row; the next one is written behind it.
                    there = rows % VAL_EVERY == VAL_EVERY - 1
                case _:
                    there = rows >= wanted
            if there and rows > before:
                time.sleep(draw.random() * 0.03)
                return True
            time.sleep(0.001)
        return False

    def wait(self, seconds: float = 120.0) -> int | None:
        """The exit code, of the first process that has one of its own; None if the job hung."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        return next((code for code in codes if code != 0), 0)


def run_process(job: JobConfig, rank: int, port: int, screen: Path) -> None:
    """One process of a job, which speaks to a file."""
    os.setsid()
    descriptor = os.open(screen, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "1000"}
    world = str(job.trainer.devices)
    if job.trainer.devices > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "chaos",
        }  # fmt: skip
    import torch

    from longnet.config.cli import reports_user_errors
    from longnet.training import recorder
    from longnet.training.run import train

    torch.set_num_threads(1)
    # As in a process that was started by hand; this one's own way would import torch again for every data worker.
    multiprocessing.set_start_method("fork", force=True)
    # Measuring it would take most of a tiny job's time.
    vars(recorder)["measure_matmul_rate"] = lambda device, dtype: 1e12
    reports_user_errors(train)(job)


def build_job(folder: Path, corpus: Path, layout: str, name: str) -> JobConfig:
    job = JobConfig()
    settings = {
        "run.root": str(folder), "run.name": name, "model.hidden_size": 32, "model.intermediate_size": 64,
        "model.num_hidden_layers": 2, "model.num_attention_heads": 4, "model.dropout": 0.1,
        "attention.dilated.base": 16, "data.source": "text", "data.path": str(corpus), "data.block_rows": 16,
        "data.context_length": 64, "data.batch_size": 1, "data.validation_fraction": 0.3, "data.validation_samples": 4,
        "optim.warmup_steps": 2, "trainer.accelerator": "cpu", "trainer.max_steps": STEPS, "trainer.log_every": 1,
        "trainer.val_every": VAL_EVERY, "trainer.val_batches": 4, "strategy.timeout": 20.0,
        "callbacks.progress": "none",
        "callbacks.save_every": SAVE_EVERY, "callbacks.plot": False, "callbacks.summary": False,
    } | LAYOUTS[layout]  # fmt: skip
    for key, value in settings.items():
        section, _, last = key.rpartition(".")
        setattr(attrgetter(section)(job), last, value)
    return job


def run_path(job: JobConfig) -> Path:
    return Path(job.run.root) / job.run.name


def outcome(job: JobConfig) -> tuple[list[dict[str, float]], str]:
    """The rows without what depends on the clock, and a hash of the final weights."""
    rows = [
        {key: value for key, value in row.items() if key not in MEASURED}
        for row in read_metrics(run_path(job) / "metrics.csv")
    ]
    weights = run_path(job) / "model/model.safetensors"
    return rows, hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""


def compare(found: tuple[list[dict[str, float]], str], expected: tuple[list[dict[str, float]], str]) -> list[str]:
    """A line for each step whose rows are missing, doubled or others than expected, and for other weights."""
    (rows, weights), (expected_rows, expected_weights) = found, expected
    lines = []
    for step in sorted({row["step"] for row in rows + expected_rows}):
        here, there = ([row for row in given if row["step"] == step] for given in (rows, expected_rows))
        if here != there:
            lines.append(f"step {step:.0f}: {here or 'no row'}, expected {there or 'no row'}")
    if not lines and rows != expected_rows:
        lines.append("the rows are in another order")
    return lines + (["the weights differ"] if weights != expected_weights else [])


def write_corpus(folder: Path, draw: random.Random) -> Path:
    words = ["alpha", "beta", "gamma", "delta", "return", "import", "self", "for", "in", "if"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(20, 200))))
    return folder


def show(console: Console, tallies: dict[str, Tally], runs: Counter[str], minutes: float, wrong: list[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("fault")
    for title in ("injected", "steps lost at most"):
        table.add_column(title, justify="right")
    table.add_column("exit codes")
    for kind, tally in sorted(tallies.items()):
        ends = ", ".join(f"{code}: {count}" for code, count in sorted(tally.ends.items()))
        table.add_row(kind, str(tally.injected), str(tally.lost), ends)
    console.print(table)
    injected = sum(tally.injected for tally in tallies.values())
    lost = max((tally.lost for tally in tallies.values()), default=0)
    console.print(
        f"{minutes:.1f} minutes, {injected} faults, {runs['finished']} runs of {STEPS} steps, saved every "
        f"{SAVE_EVERY}; steps lost at most {lost}; rows repeated, lost or changed {runs['rows']}; "
        f"exact {runs['exact']} of {runs['finished']}",
        soft_wrap=True,
        highlight=False,
    )
    for problem in wrong:
        console.print(problem, style="bold red", soft_wrap=True, highlight=False, markup=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long; the run in hand is finished")
    parser.add_argument("--folder", help="where; on a file system below 256 MB its disk is filled, too")
    parser.add_argument("--faults", nargs="+", help="only these", choices=[*KILLS, *SIGNALS, *DAMAGES, *FULL_DISKS])
    parser.add_argument("--seed", type=int, default=0, help="chooses faults and moments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
