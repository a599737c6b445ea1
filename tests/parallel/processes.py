"""A few gloo processes on this machine, that run one function and hand back what it gives."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any


@cache
def _context() -> Any:
    # The server imports torch once, with what the first custom op would bring in; each process is then a quick fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "longnet.training.run"])
    return context


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    connect: bool = True,
    wait_for: list[int] | None = None,
) -> list[Any]:
    """``function(*args)`` on every rank of a fresh world; what each gave, in the order of the ranks.

    The processes find themselves in the environment that torchrun would give them. With ``connect=False`` they make
    the process group themselves. ``wait_for`` are the ranks that are to answer, all by default.
    """
    environment = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    pipes = [_context().Pipe(duplex=False) for _ in range(world)]
    processes = [
        _context().Process(
            target=_process, args=(rank, environment, connect, pipes[rank][1], function, args), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    try:
        results = _receive({pipes[rank][0]: rank for rank in wait_for or range(world)}, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _receive(readers: dict[Any, int], timeout: float) -> list[Any]:
    """The first to fail is the one to hear of: the others only wait for it."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(readers):
        waiting = [reader for reader, rank in readers.items() if rank not in results]
        ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
        assert ready, f"ranks {[readers[reader] for reader in waiting]} gave no answer within {timeout} seconds"
        for reader in ready:
            error, results[readers[reader]] = reader.recv()
            assert error is None, f"rank {readers[reader]} failed:\n{error}"
    return [results[rank] for rank in sorted(results)]


def _process(
    rank: int, environment: dict[str, str], connect: bool, pipe: Any, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        if connect:
            dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        pipe.send((None, function(*args)))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
