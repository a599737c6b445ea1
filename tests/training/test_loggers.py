from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from longnet.config.schema import LoggerConfig
from longnet.training.loggers import build_loggers, close_loggers, log_config, wandb_mode
from longnet.training.metrics import MetricsFile
from longnet.training.rundir import RunDirectory


@pytest.fixture(autouse=True)
def no_keys(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def server():
    """Something that takes connections and never answers: what a network without a way out looks like."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_metrics_csv_is_always_there(tmp_path):
    (logger,) = build_loggers(LoggerConfig(), RunDirectory(tmp_path, "run"))
    assert isinstance(logger, MetricsFile)


def test_wandb_is_offline_without_a_key_and_asks_no_server(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("asked the network"))
    assert wandb_mode({"NETRC": "/nowhere"}) == "offline"


@pytest.mark.parametrize(("asked", "given"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")])
def test_wandb_mode_asked_for_is_kept(asked, given):
    assert wandb_mode({"WANDB_MODE": asked, "WANDB_API_KEY": "k"}) == given


def test_wandb_is_offline_when_no_server_answers(server, monkeypatch):
    monkeypatch.setattr("longnet.training.loggers._TIMEOUT", 0.2)
    assert wandb_mode({"WANDB_API_KEY": "k", "WANDB_BASE_URL": server}) == "offline"
    assert wandb_mode({"WANDB_API_KEY": "k", "WANDB_BASE_URL": "http://127.0.0.1:9"}) == "offline"


def test_wandb_is_online_with_a_key_in_the_environment_or_netrc(monkeypatch, tmp_path):
    class Answer:
        def close(self) -> None: ...

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer())
    assert wandb_mode({"WANDB_API_KEY": "k", "NETRC": "/nowhere"}) == "online"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password k\n")
    netrc.chmod(0o600)
    assert wandb_mode({"NETRC": str(netrc)}) == "online"
    assert wandb_mode({"NETRC": str(netrc), "WANDB_BASE_URL": "https://other.example"}) == "offline"


def test_wandb_and_tensorboard_write_inside_the_run_and_keep_their_id(tmp_path):
    run = RunDirectory(tmp_path, "run")
    config = LoggerConfig(wandb=True, tensorboard=True)
    ids = []
    for step in (1, 2):
        loggers = build_loggers(config, run)
        log_config(loggers, {"seed": 1})
        for logger in loggers:
            logger.log_metrics({"train/loss": 1.0}, step)
            logger.finalize("success")
        ids.append(loggers[2].logger.experiment.id)
        close_loggers(loggers)
    assert ids[0] == ids[1]
    written = {path.relative_to(run.path).parts[0] for path in run.path.rglob("*") if path.is_file()}
    assert written == {"metrics.csv", "tensorboard", "wandb", "wandb_id.txt"}
    assert len(list(Path(run.path, "wandb").glob("offline-run-*"))) == 2
