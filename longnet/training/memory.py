"""Memory in a running job: the plan it trains by, a dry step that proves it, and what happens when it does not fit."""

from __future__ import annotations

import gc
import os

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from longnet.config.errors import JobError
from longnet.config.schema import JobConfig
from longnet.model import LongNetForCausalLM
from longnet.planning import MemoryPlan, Workload, candidate_plans, choose_plan, predict_memory, suggest_savings

from . import activation_checkpointing
from .module import LongNetModule
from .placement import Placement
from .ranks import rank_workload

GIB = 2**30


class MemoryKeeper(Callback):
    """Under ``memory=auto``, picks the cheapest plan that fits and goes on with a smaller one when it does not.

    Under ``memory=manual`` the plan is the config's own, and running out of memory is an error that says what to
    change. In both, whatever was being computed is computed again from the start of the step or not at all.
    """

    def __init__(self, job: JobConfig, placement: Placement, console: Console) -> None:
        super().__init__()
        recompute = job.trainer.activation_checkpointing
        self.plan = MemoryPlan(recompute.kind, recompute.every, job.trainer.tile)
        self._auto = job.memory == "auto"
        self._job = job
        self._placement = placement
        self._console = console
        # Plans that need less memory than the one in use.
        self._smaller: list[MemoryPlan] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongNetModule)
        module = pl_module
        module.out_of_memory = lambda reason: self.escalate(module, reason)
        if not self._auto:
            return
        workload, device = self.workload(module), module.device
        self._smaller = candidate_plans(workload, host_bytes() if device.type == "cuda" else 0)
        self._use(module, choose_plan(workload, self._smaller, device_bytes(device)) or self._smaller[-1])
        while (reason := module.dry_step(self._job.data.context_length)) is not None:
            self.escalate(module, reason)
        needed = predict_memory(workload, self.plan)
        host = f", {needed.host / GIB:.3g} GiB of host memory" if needed.host else ""
        self._say(f"memory: {self.plan}, {needed.device / GIB:.3g} GiB predicted{host}; a dry step at full length fits")

    def escalate(self, module: LongNetModule, reason: str) -> None:
        """Goes on with the next smaller plan.

        Raises:
            JobError: if there is none, or it is not ours to choose; says what would help.
        """
        # What the failed step held has no owner any more, but cycles may still hold it.
        gc.collect()
        if module.device.type == "cuda":
            torch.cuda.empty_cache()
        before = self.plan
        if not self._auto or not self._smaller:
            raise JobError(self._explain(module, reason))
        self._use(module, self._smaller[0])
        self._say(f"memory: out of it with {before}; going on with {self.plan}")

    def workload(self, module: LongNetModule) -> Workload:
        on_gpu, trainer = self._placement.accelerator == "cuda", self._job.trainer
        whole = Workload(
            module.model.config,
            self._job.data.context_length,
            self._job.data.batch_size,
            self._placement.precision_name,
            trainer.residual,
            fused_norm=on_gpu and (trainer.residual == "fp32" or self._placement.compile),
            compiled=self._placement.compile,
        )
        strategy = self._job.strategy
        return rank_workload(whole, strategy.sequence_parallel_size, strategy.sequence_parallel)

    def _use(self, module: LongNetModule, plan: MemoryPlan) -> None:
        self.plan = plan
        self._smaller = self._smaller[self._smaller.index(plan) + 1 :]
        assert isinstance(module.model, LongNetForCausalLM)
        activation_checkpointing.apply(module.model, plan.kind, plan.every, plan.tile, self._placement.compile)

    def _explain(self, module: LongNetModule, reason: str) -> str:
        workload = self.workload(module)
        lines = [
            f"out of memory at step {module.global_step} with {self.plan}: {reason.splitlines()[0]}",
            f"  predicted {predict_memory(workload, self.plan).device / GIB:.3g} GiB, and the device has "
            f"{device_bytes(module.device) / GIB:.3g} GiB; what would lower that:",
        ]
        savings = suggest_savings(workload, self.plan)
        lines += [f"  {saving.change}: {saving.bytes / GIB:.3g} GiB less" for saving in savings]
        if not self._auto:
            lines.append("  memory=auto: chooses among these by itself")
        return "\n".join(lines)

    def _say(self, text: str) -> None:
        if self._job.callbacks.progress != "none":
            self._console.print(text, highlight=False, soft_wrap=True)


def device_bytes(device: torch.device) -> int:
    """What this process can have of the device's memory: what is free, and what torch already holds of it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return host_bytes()


def host_bytes() -> int:
    """The machine's memory, all of it where the system does not say how much is free."""
    names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    pages = next(os.sysconf(name) for name in names if name in os.sysconf_names)
    return pages * os.sysconf("SC_PAGE_SIZE")
