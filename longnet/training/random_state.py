"""The state of every random generator of every process."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

# More than any process's state takes as JSON; all processes must send equally much.
_BYTES = 2**16


def gather_random_state(trainer: Trainer) -> list[dict[str, Any]]:
    """The states of all processes, by rank, as plain values."""
    text = json.dumps(_own_state()).encode().ljust(_BYTES)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(trainer.strategy.root_device)
    gathered = [own]
    if trainer.world_size > 1:
        gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
        dist.all_gather(gathered, own)
    return [json.loads(text.cpu().numpy().tobytes()) for text in gathered]


def set_random_state(states: list[dict[str, Any]], rank: int) -> None:
    """Goes on where a process of this rank was; a rank that there was not keeps the state it has."""
    if rank >= len(states):
        return
    state = states[rank]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _own_state() -> dict[str, Any]:
    name, key, *rest = np.random.get_state()
    assert isinstance(key, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": [name, key.tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None,
    }


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
