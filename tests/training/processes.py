"""Training jobs in processes of their own, which can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longnet.config.schema import JobConfig

from ..parallel.processes import _context


@dataclass
class Running:
    """One process of a job, and the file that it speaks to."""

    process: Any
    screen: Path

    @property
    def said(self) -> str:
        return self.screen.read_text()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def running(job: JobConfig, before: str = "") -> Iterator[list[Running]]:
    """The processes of a job, which are gone afterwards; ``before`` is run in each before the job."""
    root = Path(job.run.root)
    root.mkdir(parents=True, exist_ok=True)
    world = job.trainer.devices
    port = 20000 + (os.getpid() + int(time.monotonic() * 10)) % 40000
    ranks = []
    for rank in range(world):
        screen = root / f"{job.run.name}-{rank}-{time.monotonic_ns()}.txt"
        process = _context().Process(target=_process, args=(job, before, rank, world, port, screen))
        process.start()
        ranks.append(Running(process, screen))
    try:
        yield ranks
    finally:
        for rank in ranks:
            # With its data workers.
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGKILL)
            rank.process.join()


def wait_until(condition: Callable[[], Any], rank: Running, seconds: float = 120.0) -> bool:
    """Waits for a condition, or for the process to end; whether the condition came true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if not rank.process.is_alive():
            return False
        time.sleep(0.002)
    raise AssertionError(f"nothing happened in {seconds} seconds")


def finish(ranks: list[Running], seconds: float = 120.0) -> tuple[list[int | None], str]:
    """Exit codes and everything that was said."""
    for rank in ranks:
        rank.process.join(seconds)
    return [rank.process.exitcode for rank in ranks], "".join(rank.said for rank in ranks)


def _process(job: JobConfig, before: str, rank: int, world: int, port: int, screen: Path) -> None:
    os.setsid()
    descriptor = os.open(screen, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Whoever starts tests in the background may have it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
    import torch

    from longnet.config.cli import reports_user_errors
    from longnet.training import recorder
    from longnet.training.run import train

    torch.set_num_threads(1)
    # As in a process that was started by hand; this one's own way would import torch again for every data worker.
    multiprocessing.set_start_method("fork", force=True)
    recorder.measure_matmul_rate = lambda device, dtype: 1e12
    exec(before, {})
    try:
        reports_user_errors(train)(job)
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
