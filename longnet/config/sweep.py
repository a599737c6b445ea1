"""A sweep as a whole: every job checked before the first one starts, and all runs compared after the last."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from .cli import report_and_exit
from .errors import ConfigError
from .loading import load
from .machine import Machine, inspect_machine
from .schema import JobConfig


class SweepCallback(Callback):
    """Hydra's hooks around a `--multirun` of its basic sweeper; for other sweepers it does nothing."""

    def __init__(self) -> None:
        self.run_dirs: list[Path] = []
        self.failed = False

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.sweeper._target_ != f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}":
            return
        try:
            jobs = check_sweep(config)
        except ConfigError as error:
            # Hydra makes a warning of a callback's exceptions, and would start the jobs.
            report_and_exit(error)
        self.run_dirs = [Path(job.run.root) / job.run.name for job in jobs]
        print(f"A sweep of {len(jobs)} runs:", *self.run_dirs, sep="\n  ", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if not self.run_dirs:
            return
        number = config.hydra.job.num
        if job_return.status != JobStatus.COMPLETED:
            self.failed = True
            error = job_return._return_value
            print(f"{self.run_dirs[number]} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # Hydra raises the first failure once all jobs are through, and then ends without on_multirun_end.
        if self.failed and number == len(self.run_dirs) - 1:
            self.on_multirun_end(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self.run_dirs:
            from longnet.evaluation.compare import compare

            compare(self.run_dirs, Path(config.hydra.sweep.dir))


def check_sweep(config: DictConfig) -> list[JobConfig]:
    """The jobs of a sweep, every one of them checked.

    Raises:
        ConfigError: with the problems of all jobs, or if two jobs would share a run directory.
    """
    loader = GlobalHydra.instance().config_loader()
    # As it was given: what it refers to is known only in the jobs.
    asked: Any = OmegaConf.to_container(config.hydra, resolve=False)
    given = [f"{key}={value}" for key, value in (asked["sweeper"]["params"] or {}).items()]
    overrides = OverridesParser.create(loader).parse_overrides([*given, *asked["overrides"]["task"]])
    fixed = sorted({o.key_or_group for o in overrides} - {o.key_or_group for o in overrides if o.is_sweep_override()})
    # Names are made of what varies. This setting of Hydra's travels to the jobs, whatever launcher starts them.
    config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    (batch,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    jobs: list[JobConfig] = []
    found: dict[str, list[str]] = {}
    before = HydraConfig.instance().cfg
    # SLURM will start the processes, on machines that this one knows nothing of.
    machine = Machine(multi_node_launcher=True) if _on_slurm(config) else inspect_machine()
    for job_overrides in batch:
        cfg = loader.load_sweep_config(config, list(job_overrides))
        HydraConfig.instance().set_config(cfg)
        try:
            jobs.append(load(cfg, machine))
            problems = _processes_of_its_own(jobs[-1], job_overrides, config)
        except ConfigError as error:
            problems = error.problems
        for problem in problems:
            found.setdefault(problem, []).append(" ".join(o for o in job_overrides if o.split("=")[0] not in fixed))
    HydraConfig.instance().cfg = before
    for name, count in Counter(job.run.name for job in jobs).items():
        if count > 1:
            found[f"run.name={name}: {count} jobs of the sweep would share it; expected what varies to differ"] = []
    if found:
        everywhere = (0, len(batch))
        raise ConfigError([p if len(of) in everywhere else f"[{', '.join(of)}] {p}" for p, of in found.items()])
    return jobs


def _on_slurm(config: DictConfig) -> bool:
    return str(config.hydra.runtime.choices.get("hydra/launcher")).startswith("submitit")


def _processes_of_its_own(job: JobConfig, overrides: Sequence[str], config: DictConfig) -> list[str]:
    processes = job.trainer.devices * job.trainer.num_nodes
    if processes == 1 or _on_slurm(config):
        return []
    # Lightning would start the whole sweep again in each of the processes.
    nodes = f"--nnodes {job.trainer.num_nodes} " if job.trainer.num_nodes > 1 else ""
    named = [*(o for o in overrides if not o.startswith("run.name=")), f"run.name={job.run.name}"]
    return [
        f"trainer.devices={job.trainer.devices} trainer.num_nodes={job.trainer.num_nodes}: a sweep runs its jobs in "
        f"one process; expected a command a job: torchrun {nodes}--nproc-per-node {job.trainer.devices} train.py "
        + " ".join(map(shlex.quote, named))
    ]
