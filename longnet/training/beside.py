"""A logger beside training: it may fail or hang, and training does not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger

# Rows that wait for a logger that is slow; what comes after these is dropped.
_WAITING = 1000
# Seconds given at the end to write what waits.
_PATIENCE = 30.0


class LoggerBeside(Logger):
    """Hands everything to another logger in a thread of its own, and goes on without it once it fails.

    Args:
        logger: the other one.
        warn: told, once, when it has failed or is too slow.
        close: called in the thread at the end.
    """

    def __init__(self, logger: Logger, warn: Callable[[str], None], close: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.logger = logger
        self._warn = warn
        self._close = close
        self._gone = False
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue(_WAITING)
        # Nothing waits for it when the process ends.
        self._thread = threading.Thread(target=self._work, name=f"{self.name}-logger", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return type(self.logger).__name__.removesuffix("Logger").lower()

    @property
    def version(self) -> str | int | None:
        return self.logger.version

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = dict(metrics)
        self._hand_over(lambda: self.logger.log_metrics(row, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._hand_over(lambda: self.logger.log_hyperparams(params))

    def finalize(self, status: str) -> None:
        self._hand_over(lambda: self.logger.finalize(status))

    def finish(self, patience: float = _PATIENCE) -> None:
        """Waits a while for what is left to be written."""
        if self._close is not None:
            self._hand_over(self._close)
        try:
            self._calls.put(None, timeout=patience)
            self._thread.join(patience)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._give_up(f"did not answer for {patience:g} seconds")

    def _hand_over(self, call: Callable[[], Any]) -> None:
        if self._gone:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"has not taken {_WAITING} rows")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if not self._gone:
                    call()
            except Exception as error:
                self._give_up(f"failed ({type(error).__name__}: {error})")

    def _give_up(self, why: str) -> None:
        if not self._gone:
            self._gone = True
            self._warn(f"WARNING: the logger {self.name} {why}; training goes on without it, metrics.csv has all rows")
