"""Numbers gone bad: steps whose loss or gradient is not finite, and losses that jump."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from longnet.config.errors import JobError
from longnet.config.schema import GuardConfig

from .datamodule import TextDataModule
from .module import LongNetModule


class LossSpikeError(Exception):
    """The loss has jumped at a step: the run is to go back, and on with other data."""

    def __init__(self, step: int, loss: float, usual: float) -> None:
        super().__init__(f"the loss is {loss:.4g} at step {step}, and was {usual:.4g} before")
        self.step = step


class Guard(Callback):
    """Stops a run, or skips the step, where numbers are not finite; asks to go back where the loss has jumped.

    What it looks at is summed over all processes, so all of them come to the same decision.

    Args:
        config: what to do.
        data: knows what a step was trained on.
        warn: told of steps that are skipped.
    """

    def __init__(self, config: GuardConfig, data: TextDataModule, warn: Callable[[str], None]) -> None:
        super().__init__()
        self.config = config
        self.skipped = 0
        self._in_a_row = 0
        self._data = data
        self._warn = warn
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongNetModule)
        module = pl_module
        module.judge = lambda loss, sound, batch: self._judge(module, loss, sound, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "skipped": self.skipped, "losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row, self.skipped = state_dict["in_a_row"], state_dict["skipped"]
        self._losses.extend(state_dict["losses"])

    def _judge(self, module: LongNetModule, loss: float, sound: bool, batch: dict[str, Any]) -> None:
        if not sound:
            self._pass_over(module, loss, batch)
            return
        config = self.config
        self._in_a_row = 0
        if config.spike_factor and len(self._losses) == config.spike_window:
            usual = statistics.median(self._losses)
            if loss > config.spike_factor * usual:
                raise LossSpikeError(module.global_step, loss, usual)
        self._losses.append(loss)

    def _pass_over(self, module: LongNetModule, loss: float, batch: dict[str, Any]) -> None:
        step, optim, config = module.global_step, module.optim, self.config
        what = "the gradient" if math.isfinite(loss) else "the loss"
        where = find_not_finite(module, batch)
        text = f"{what} is not finite at step {step}: first in {where}; {self._data.describe_batch(step - 1)}"
        self._in_a_row += 1
        if config.non_finite == "skip" and self._in_a_row <= config.skip_limit:
            self.skipped += 1
            limit = f"trainer.guard.skip_limit={config.skip_limit}"
            self._warn(f"WARNING: {text}. Skipped, {self._in_a_row} in a row of {limit}")
            return
        raise JobError(
            f"{text}. Lower optim.lr={optim.lr:g}, lengthen optim.warmup_steps={optim.warmup_steps}, or try "
            f"trainer.precision=fp32; trainer.guard.non_finite=skip leaves out up to trainer.guard.skip_limit="
            f"{config.skip_limit} such steps in a row"
        )


def find_not_finite(module: LongNetModule, batch: dict[str, Any]) -> str:
    """The first part of the model that is not finite for a batch: of the weights, of forward, of backward."""
    model = module.model
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"the weight {name}"
    found: list[str] = []

    def look_at(name: str) -> Callable[..., None]:
        def hook(part: Any, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            if not found and not all(_is_finite(x) for x in tensors if isinstance(x, Tensor)):
                found.append(f"the output of {name or 'the model'} ({type(part).__name__})")

        return hook

    handles = [part.register_forward_hook(look_at(name)) for name, part in model.named_modules()]
    try:
        losses = module.forward_again(batch)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if not all(_is_finite(loss) for loss in losses):
        return "the loss itself"
    # Backward goes from the end to the beginning.
    gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    bad = (name for name, gradient in reversed(gradients) if gradient is not None and not _is_finite(gradient))
    return next((f"the gradient of {name}" for name in bad), "another process")


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not local.is_floating_point() or bool(local.isfinite().all())
