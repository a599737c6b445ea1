"""The Triton kernel of the loss, through Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from longnet.training.loss import linear_cross_entropy

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(GPU or INTERPRETED or find_spec("triton") is None, reason="the cases below run by themselves")
def test_cases_through_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so this takes a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout, done.stdout


@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or Triton's interpreter: see the test above")
@pytest.mark.parametrize("vocabulary", [37, 5000])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_equals_the_plain_chunks(vocabulary: int, z_loss: float) -> None:
    device = "cuda" if GPU else "cpu"
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (40, vocabulary))
    labels = torch.randint(vocabulary, (40,), generator=generator).to(device)
    labels[::7] = -100
    found = {}
    for backend in ("chunked", "fused"):
        sums = linear_cross_entropy(hidden, weight, labels, z_loss=z_loss, backend=backend, chunk_rows=16)
        with torch.no_grad():
            without = linear_cross_entropy(hidden, weight, labels, z_loss=z_loss, backend=backend, chunk_rows=16)
        found[backend] = (*sums, *without, *torch.autograd.grad(0.3 * sums.loss, (hidden, weight)))
    for ours, expected in zip(found["fused"], found["chunked"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
