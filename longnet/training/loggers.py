"""Where metrics go besides the screen: `metrics.csv` always, wandb and tensorboard by choice."""

from __future__ import annotations

import netrc
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from longnet.config.machine import is_first_process
from longnet.config.schema import LoggerConfig

from .beside import LoggerBeside
from .environment import command_line
from .metrics import MetricsFile
from .rundir import RunDirectory

WandbMode = Literal["online", "offline", "disabled"]

# Seconds to wait for wandb's server; a machine without a network must not be held up.
_TIMEOUT = 3.0


def build_loggers(
    config: LoggerConfig, run: RunDirectory, parts: Collection[str] = (), warn: Callable[[str], None] = print
) -> list[Logger]:
    """The loggers of a run, all of which keep their files inside its directory; only the first process has them all.

    Args:
        config: which there are.
        run: whose directory.
        parts: the names of a mixture's parts.
        warn: told when one of them cannot go on; the run does.
    """
    loggers: list[Logger] = [MetricsFile(run.metrics, parts, warn)]
    if not is_first_process():
        return loggers
    if config.tensorboard:
        loggers.append(LoggerBeside(TensorBoardLogger(save_dir=run.path, name=None, version="tensorboard"), warn))
    if config.wandb:
        try:
            wandb = _wandb(config, run)
        except Exception as error:
            warn(f"WARNING: wandb cannot be used ({type(error).__name__}: {error}); training goes on without it")
        else:
            loggers.append(LoggerBeside(wandb, warn, close=lambda: wandb.experiment.finish()))
    return loggers


def log_config(loggers: list[Logger], config: dict[str, Any]) -> None:
    """Gives the resolved config to the loggers that keep one."""
    for logger in loggers:
        logger.log_hyperparams(config)


def close_loggers(loggers: list[Logger]) -> None:
    """Ends what outlives a trainer: the next job of a sweep, in the same process, begins its own wandb run."""
    for logger in loggers:
        if isinstance(logger, LoggerBeside):
            logger.finish()


def wandb_mode(environ: dict[str, str] | None = None) -> WandbMode:
    """How to run wandb: "online" only where it need not ask nor wait, with a key set and a server that answers."""
    environ = dict(os.environ) if environ is None else environ
    asked = environ.get("WANDB_MODE", "")
    if asked == "disabled":
        return "disabled"
    if asked in ("offline", "dryrun"):
        return "offline"
    server = environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return "online" if _has_key(environ, server) and _answers(server) else "offline"


def _wandb(config: LoggerConfig, run: RunDirectory) -> WandbLogger:
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    mode = wandb_mode()

    def begin(mode: WandbMode) -> Any:
        return wandb.init(
            project=config.wandb_project,
            name=run.name,
            id=_run_id(run.path / "wandb_id.txt"),
            resume="allow",
            dir=run.path,
            mode=mode,
            # Console capture would fight with the live progress bar.
            settings=wandb.Settings(console="off", init_timeout=30),
        )

    # wandb keeps the command line, and would keep it with what is secret in it.
    whole, sys.argv = sys.argv, command_line()
    try:
        experiment = begin(mode)
    except wandb.Error:
        if mode != "online":
            raise
        # The server answers but does not take the run; it can be sent later by `wandb sync`.
        experiment = begin("offline")
    finally:
        sys.argv = whole
    experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=experiment, save_dir=run.path)


def _run_id(path: Path) -> str:
    # Kept in the run's directory, so that a resumed run draws on in the same chart. A sweep's agent gives its own.
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        path.write_text(given or secrets.token_hex(4))
    return path.read_text().strip()


def _has_key(environ: dict[str, str], server: str) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    file = environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(file).authenticators(urlparse(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(server: str) -> bool:
    try:
        urllib.request.urlopen(server, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
