import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Several test processes share the cores; threads of their own would only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI must not fail by the luck of the draw; everyone else keeps searching.
settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-gpu` on a machine with one"))


@pytest.fixture(autouse=True)
def own_matmul_precision() -> Iterator[None]:
    """A training job sets it for its process; the next test is to have the exact one."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
