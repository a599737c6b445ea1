"""Where a job runs and in which number format, settled before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longnet.config.schema import TrainerConfig

_PRECISIONS: dict[Literal["bf16", "fp16", "fp32"], Literal["bf16-mixed", "16-mixed", "32-true"]] = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp32": "32-true",
}


@dataclass(frozen=True)
class Placement:
    """The device of a job, in Lightning's words."""

    accelerator: Literal["cpu", "cuda", "mps"]
    precision: Literal["bf16-mixed", "16-mixed", "32-true"]
    compile: bool

    @property
    def precision_name(self) -> Literal["bf16", "fp16", "fp32"]:
        return next(name for name, value in _PRECISIONS.items() if value == self.precision)

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The format in which the device's speed is measured; few CPUs have products in a shorter one than fp32."""
        if self.accelerator == "cpu":
            return torch.float32
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}[self.precision]


def place(trainer: TrainerConfig) -> Placement:
    """Resolves "auto" and checks that the machine has what was asked for.

    Raises:
        ValueError: if it has not.
    """
    accelerator = _accelerator(trainer.accelerator)
    if accelerator == "cuda" and trainer.devices > torch.cuda.device_count():
        raise ValueError(
            f"trainer.devices={trainer.devices}: this machine has {torch.cuda.device_count()} GPU(s); "
            f"set trainer.devices={torch.cuda.device_count()}"
        )
    compiled = trainer.compile == "on" or (trainer.compile == "auto" and accelerator == "cuda")
    return Placement(accelerator, _precision(trainer.precision, accelerator), compiled)


def _accelerator(asked: str) -> Literal["cpu", "cuda", "mps"]:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked in ("gpu", "cuda"):
        if not torch.cuda.is_available():
            reason = "torch was built without CUDA" if torch.version.cuda is None else "torch sees none"
            raise ValueError(
                f"trainer.accelerator={asked}: no GPU here ({reason}); set trainer.accelerator=cpu or auto"
            )
        return "cuda"
    if asked == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("trainer.accelerator=mps: no Apple GPU here; set trainer.accelerator=cpu or auto")
        return "mps"
    if asked == "cpu":
        return "cpu"
    raise ValueError(f"trainer.accelerator={asked!r}: expected auto, cpu, gpu or mps")


def _precision(asked: str, accelerator: str) -> Literal["bf16-mixed", "16-mixed", "32-true"]:
    bf16_native = accelerator == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "auto":
        if accelerator != "cuda":
            return "32-true"
        return "bf16-mixed" if bf16_native else "16-mixed"
    if asked not in _PRECISIONS:
        raise ValueError(f"trainer.precision={asked!r}: expected auto, {', '.join(_PRECISIONS)}")
    if asked == "fp16" and accelerator != "cuda":
        raise ValueError(f"trainer.precision=fp16: only GPUs train in it, and this is {accelerator}; use fp32 or bf16")
    if asked == "bf16" and accelerator == "cuda" and not bf16_native:
        raise ValueError(f"trainer.precision=bf16: {torch.cuda.get_device_name()} has no bfloat16; use fp16 or fp32")
    return _PRECISIONS[asked]
