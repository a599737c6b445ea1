"""Nothing that is read runs code, leads out of its place, or carries a secret away."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longnet.checkpoint import DamagedError, Facts, Writer, path_of, read_whole, steps_of, verify
from longnet.checkpoint.manifest import SEAL, _seal
from longnet.config.cli import check_command_line
from longnet.training.run import train

from .config.conftest import CONF, problems_with
from .training.conftest import corpus_path, known_matmul_rate, make_job  # noqa: F401

ROOT = Path(__file__).parent.parent
SOURCES = [*sorted((ROOT / "longnet").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py")), ROOT / "train.py"]
# Calls that run what they read.
FORBIDDEN = {
    "torch.load", "torch.hub.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "eval", "exec", "os.system", "os.popen",
    "extractall", "LongNetModule.load_from_checkpoint", "dcp.load", "dcp_to_torch_save",
}  # fmt: skip


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles_or_runs_text(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            assert name not in FORBIDDEN, f"line {node.lineno}: {name}"
            assert name.rpartition(".")[2] not in {"extractall", "load_from_checkpoint"}, f"line {node.lineno}"
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                risky = keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and value is not False
                assert not risky, f"line {node.lineno}: {keyword.arg}"
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        assert not {"pickle", "shelve", "marshal", "dill", "cloudpickle"} & {name.split(".")[0] for name in names}


def test_a_run_is_saved_and_resumed_without_a_pickle(make_job, monkeypatch):  # noqa: F811
    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for owner, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(owner, name, refuse)
    train(make_job(trainer__max_steps=3))
    train(make_job(trainer__max_steps=6))
    run = Path(make_job().run.root) / "default"
    kinds = {path.suffix for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


@pytest.mark.parametrize("place", ["file", "manifest.json", "state.json", "tensors-00000.safetensors"])
def test_a_malicious_pickle_is_never_read(make_job, tmp_path, place):  # noqa: F811
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    torch.save({"state_dict": Bomb(mark)}, tmp_path / "bomb.ckpt")
    target = tmp_path / "bomb.ckpt"
    if place != "file":
        target = path_of(tmp_path, 3)
        Writer(target, {"global_step": 3}, Facts(3)).write()
        (target / place).write_bytes(bomb)
        if place != "manifest.json":
            # Whoever can write the file can write its hash.
            manifest = json.loads((target / "manifest.json").read_text())
            manifest["files"][place] = {"size": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
            manifest[SEAL] = _seal(manifest)
            (target / "manifest.json").write_text(json.dumps(manifest))
            verify(target)
            with pytest.raises(DamagedError):
                read_whole(target)
    with pytest.raises(ValueError, match=r"pickled checkpoints are never read|cannot be read|another config"):
        train(make_job(resume=str(target)))
    assert not mark.exists()


def test_code_among_the_hyper_parameters_is_not_run(make_job, tmp_path):  # noqa: F811
    job = make_job(trainer__max_steps=3)
    train(job)
    last = steps_of(Path(job.run.root) / "default/checkpoints")[-1]
    mark = tmp_path / "executed"
    state = read_whole(last)
    state["hyper_parameters"] = {"_instantiator": "os.mkdir", "_class_path": "os.mkdir", "path": str(mark)}
    state["datamodule_hyper_parameters"] = {"_target_": "os.mkdir", "path": str(mark)}
    manifest = verify(last)
    Writer(last, state, Facts(manifest.step, manifest.config)).write()
    train(make_job(trainer__max_steps=4))
    assert not mark.exists()


EVIL = "logging.os.mkdir"
OVERRIDES = [
    "+hydra.callbacks.evil={_target_: %s, path: MARK}",
    "hydra.launcher._target_=%s",
    "hydra.sweeper._target_=%s",
    "+hydra.callbacks.evil._target_=hydra._internal.utils.os.system",
    "+hydra.hydra_logging.handlers.evil.class=%s",
    "+hydra.callbacks={evil: {_target_: '${oc.decode:%s}', path: MARK}}",
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_code_that_is_not_on_the_list_is_refused(override, tmp_path, monkeypatch, capsys):
    mark = tmp_path / "executed"
    override = override.replace("%s", EVIL).replace("MARK", str(mark))
    monkeypatch.setattr(sys, "argv", ["train.py", override])
    with pytest.raises(SystemExit) as caught:
        check_command_line(CONF, "train", about="")
    assert caught.value.code == 2
    assert "a config may not name this code" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("section", "key", "commands"),
    [
        ("callbacks", "_target_", [["experiment=evil"], ["-m", "experiment=stdlib_gpu,evil"]]),
        ("job_logging", "()", [["experiment=evil"]]),
    ],
)
def test_an_experiment_cannot_bring_code_along(tmp_path, section, key, commands):
    mark = tmp_path / "executed"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/evil.yaml").write_text(
        f"# @package _global_\nhydra:\n  {section}:\n    evil:\n      {key}: {EVIL}\n      path: {mark}\n"
    )
    for arguments in commands:
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", "--config-dir", tmp_path, *arguments, f"run.root={tmp_path}/runs"],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"hydra.{section}.evil.{key}={EVIL}: a config may not name this code" in done.stderr
        assert not mark.exists()
        assert not (tmp_path / "runs").exists()


def test_a_jobs_own_keys_name_no_code():
    for values in (
        {"attention__layers": [{"_target_": EVIL}]},
        {"data__source": "mixture", "data__mixture": [{"source": "stdlib", "_target_": EVIL}]},
        {"model___target_": EVIL},
    ):
        assert problems_with(**values), values


@pytest.mark.parametrize("name", ["../outside", "/absolute", "a/b", "..", ".", "", "a\0b", "~/x", "a\\b", " "])
def test_a_run_cannot_leave_its_root(name):
    assert any(line.startswith("run.name=") for line in problems_with(run__name=name))


SECRET = "not-for-anyones-eyes-6c1f"


@pytest.mark.usefixtures("known_matmul_rate")
def test_secrets_stay_where_they_are(make_job, monkeypatch, capfd, tmp_path):  # noqa: F811
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["train.py", f"+api_key={SECRET}", f"data.path=https://me:{SECRET}@host/data"])
    job = make_job(logger__wandb=True, logger__tensorboard=True, callbacks__progress="plain", callbacks__summary=True)
    train(job)
    assert SECRET not in "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
