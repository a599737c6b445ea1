"""A process that dies, or that never answers: the others say so, in time."""

from __future__ import annotations

import os
import time

import pytest

from ..training.conftest import corpus_path  # noqa: F401
from ..training.jobs import tiny_job
from .processes import run

TIMEOUT = 4


def train_until_one_is_gone(job, how: str) -> tuple[str, float]:
    from longnet.config.errors import JobError
    from longnet.training import recorder
    from longnet.training.module import LongNetModule
    from longnet.training.run import train

    recorder.measure_matmul_rate = lambda device, dtype: 1e12
    began = 0.0
    step = LongNetModule.training_step

    def training_step(self, batch):
        nonlocal began
        if self.global_step == 2:
            began = time.monotonic()
            if os.environ["RANK"] == "1":
                if how == "dies":
                    os._exit(1)
                time.sleep(60)
        return step(self, batch)

    LongNetModule.training_step = training_step
    try:
        train(job)
    except JobError as error:
        # The others must not hear of it by the end of this process.
        print(flush=True)
        return str(error), time.monotonic() - began
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("how", ["dies", "never answers"])
def test_the_others_end_in_time(how, tmp_path, corpus_path):  # noqa: F811
    job = tiny_job(
        tmp_path, corpus_path,
        **{"strategy.name": "sequence_parallel", "strategy.sequence_parallel_size": 2, "strategy.timeout": TIMEOUT,
           "trainer.devices": 2, "trainer.max_steps": 5},
    )  # fmt: skip
    (message, seconds), *_ = run(2, train_until_one_is_gone, job, how, connect=False, wait_for=[0])
    assert message.startswith(
        f"process 0 of 2 lost another one, which has died or has not answered for strategy.timeout={TIMEOUT} seconds"
    )
    assert seconds < TIMEOUT + 5
    if how == "never answers":
        assert seconds > TIMEOUT - 1
