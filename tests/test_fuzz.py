"""Random configs and random bytes: a result or a clear error, never a traceback from the depth."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longnet.checkpoint import DamagedError, Facts, Writer, newest_good, path_of, read_whole, verify
from longnet.checkpoint.manifest import SEAL, _seal
from longnet.config import ConfigError, JobConfig, load
from longnet.config.machine import Machine
from longnet.config.typed import leaves
from longnet.data import build_corpus, load_tokenizer
from longnet.data.documents import SourceSpec
from longnet.training.rundir import RunDirectory

LEAVES = dict(leaves(JobConfig))
# LONGNET_FUZZ=20000 looks longer.
LONGER = int(os.environ.get("LONGNET_FUZZ", 0))
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=LONGER or 400)
SOME = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=LONGER or 60)

junk: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "${x}", "???"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def values_for(hint: Any) -> Any:
    """Mostly values of the right type, in and out of their ranges."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint)) | junk
    options = get_args(hint)
    if type(None) in options:
        return st.none() | values_for(next(option for option in options if option is not type(None)))
    numbers = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 64, 100, 1024, -1, 2**31, 10**30, 0.5, 1e-3])
    right = {int: numbers, float: numbers, bool: st.booleans(), str: st.sampled_from(["runs", "a", "/", "..", "bytes"])}
    return (right[hint] | junk) if hint in right else junk | st.lists(numbers, max_size=4)


@MANY
@given(st.data())
def test_any_config_loads_or_says_what_is_wrong(data):
    tree = dataclasses.asdict(JobConfig())
    for key in data.draw(st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=6, unique=True)):
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section[part]
        section[last] = data.draw(values_for(LEAVES[key]))
    machine = Machine(gpus=data.draw(st.sampled_from([None, 0, 1, 8])))
    try:
        job = load(tree, machine)
    except ConfigError as error:
        assert error.problems
        assert all(problem.strip() for problem in error.problems)
    else:
        assert isinstance(job, JobConfig)


@MANY
@given(junk)
def test_any_mapping_as_a_config_loads_or_says_what_is_wrong(tree):
    try:
        load(tree if isinstance(tree, dict) else {"optim": tree}, Machine())
    except ConfigError as error:
        assert error.problems


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import torch

    path = path_of(tmp_path_factory.mktemp("good"), 3)
    Writer(path, {"global_step": 3, "state_dict": {"w": torch.ones(3, 4), "n": torch.tensor(1)}}, Facts(3)).write()
    return {file.name: file.read_bytes() for file in path.iterdir()}


def spoil(data, content: bytes) -> bytes:
    """Other bytes, or some of them, or the same with a few changed."""
    kind = data.draw(st.sampled_from(["other", "cut", "flip", "insert"]))
    if kind == "other":
        return data.draw(st.binary(max_size=200))
    place = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "cut":
        return content[:place]
    if kind == "insert":
        return content[:place] + data.draw(st.binary(min_size=1, max_size=8)) + content[place:]
    return content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]


@SOME
@given(st.data())
def test_a_spoilt_checkpoint_is_refused(checkpoint, data):
    name = data.draw(st.sampled_from(sorted(checkpoint)))
    spoilt = spoil(data, checkpoint[name])
    with tempfile.TemporaryDirectory() as folder:
        path = path_of(Path(folder), 3)
        path.mkdir()
        for other, content in checkpoint.items():
            (path / other).write_bytes(spoilt if other == name else content)
        try:
            verify(path)
        except DamagedError as error:
            assert name in str(error)
            with pytest.raises(DamagedError):
                newest_good(Path(folder), print)
        else:
            # Spaces in a manifest say nothing.
            assert name == "manifest.json"
            assert json.loads(spoilt) == json.loads(checkpoint[name])


@SOME
@given(st.data())
def test_a_forged_checkpoint_is_refused_or_read(checkpoint, data):
    """Whoever can spoil a file can also write the hash that fits it."""
    name = data.draw(st.sampled_from(sorted(set(checkpoint) - {"manifest.json"})))
    spoilt = spoil(data, checkpoint[name])
    manifest = json.loads(checkpoint["manifest.json"])
    manifest["files"][name] = {"size": len(spoilt), "sha256": hashlib.sha256(spoilt).hexdigest()}
    manifest[SEAL] = _seal(manifest)
    with tempfile.TemporaryDirectory() as folder:
        for other, content in checkpoint.items():
            (Path(folder) / other).write_bytes(spoilt if other == name else content)
        (Path(folder) / "manifest.json").write_text(json.dumps(manifest))
        verify(Path(folder))
        with suppress(DamagedError):
            read_whole(Path(folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = RunDirectory(tmp_path_factory.mktemp("runs"), "default")
    directory.open(JobConfig(), {})
    directory.close()
    Writer(path_of(directory.checkpoints, 1), {}, Facts(1)).write()
    return directory


@SOME
@given(st.binary(max_size=100) | st.text(max_size=50).map(str.encode) | junk.map(yaml.safe_dump).map(str.encode))
def test_any_bytes_as_a_run_config_are_refused(run, content):
    run.config.write_bytes(content)
    with pytest.raises(ValueError, match="config.yaml is damaged"):
        run.find_start(JobConfig())


@SOME
@given(st.binary(max_size=100) | junk.map(yaml.safe_dump).map(str.encode))
def test_any_bytes_as_an_environment_are_refused(run, content):
    run.environment.write_bytes(content)
    with pytest.raises(ValueError, match="environment.json is damaged"):
        run.check_same_data(path_of(run.checkpoints, 1), "fingerprint")


@SOME
@given(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), st.binary(max_size=100) | junk.map(yaml.safe_dump))
def test_any_bytes_as_a_tokenizer_are_refused(name, content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match="tokenizer"):
            load_tokenizer(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    from longnet.data import tokenize

    texts = tmp_path_factory.mktemp("texts")
    for number in range(24):
        (texts / f"{number}.txt").write_text("some words in a row\n" * (number + 3))
    target = tmp_path_factory.mktemp("stores") / "store"
    tokenize(SourceSpec("text", str(texts), validation_fraction=0.5), "bytes", target)
    return {file.relative_to(target): file.read_bytes() for file in target.rglob("*") if file.is_file()}


@SOME
@given(st.data())
def test_a_spoilt_store_is_refused_or_read(store, data):
    name = data.draw(st.sampled_from(sorted(store)))
    with tempfile.TemporaryDirectory() as folder:
        for other, content in store.items():
            (Path(folder) / other).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / other).write_bytes(spoil(data, content) if other == name else content)
        try:
            corpus = build_corpus(source="prepared", path=folder, tokenizer=None, context_length=16)
            corpus.train[0]
        except ValueError as error:
            assert folder in str(error)
