"""Checkpoints as directories: the same state back, whole or absent, and never one with a changed byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from longnet.checkpoint import (
    DamagedError,
    Facts,
    HostCopies,
    Processes,
    Writer,
    best_of,
    bring_back,
    clean,
    files,
    newest_good,
    path_of,
    prune,
    read_manifest,
    read_whole,
    steps_of,
    verify,
    writing,
)
from longnet.checkpoint.manifest import SEAL, _seal
from longnet.checkpoint.tree import flatten, restore

TIED = torch.arange(6.0).reshape(2, 3)
STATE = {
    "state_dict": {"a": TIED, "head": TIED, "b": torch.randn(5, dtype=torch.bfloat16), "step": torch.tensor(3)},
    "optimizer_states": [{"state": {"a": {"exp_avg": torch.randn(2, 3, dtype=torch.float64)}}, "betas": (0.9, 0.95)}],
    "loops": {"epoch": 0, 7: [1, None, True, float("inf")], "empty": {}, "nothing": torch.empty(0, 4)},
    "text": "naïve \u2028 $tensor",
}


def save(folder: Path, step: int, loss: float | None = None, state=STATE, **options) -> Path:
    target = path_of(folder, step)
    Writer(target, state, Facts(step, "hash", loss), **options).write()
    return target


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right and type(left) is type(right)


def test_the_state_comes_back_bit_for_bit(tmp_path):
    path = save(tmp_path, 3, loss=1 / 3)
    assert same(read_whole(path), STATE)
    manifest = verify(path)
    assert (manifest.step, manifest.config, manifest.validation_loss) == (3, "hash", 1 / 3)
    assert {entry.name for entry in path.iterdir()} == {"manifest.json", *manifest.files}
    assert {entry.suffix for entry in path.iterdir()} == {".json", ".safetensors"}
    # A file like any other of its kind, in which tied weights are one tensor.
    tensors = load_file(path / "tensors-00000.safetensors")
    assert torch.equal(tensors["state_dict/a"], TIED)
    assert "state_dict/head" not in tensors


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
def test_any_plain_value_comes_back(value):
    state = {"value": value, "$odd": {"$tensor": [value]}}
    tree, tensors = flatten(state)
    assert not tensors
    assert same(restore(json.loads(json.dumps(tree)), pytest.fail), state)


@pytest.mark.parametrize("value", [object(), b"bytes", {1.5: 0}, {"f": print}, Path("a")])
def test_what_is_neither_a_tensor_nor_plain_is_refused(tmp_path, value):
    with pytest.raises(TypeError, match="cannot be saved"):
        save(tmp_path, 1, state={"value": value})


def damage(path: Path, how: str) -> str:
    """Damages a checkpoint; what the complaint must name."""
    file = path / {"flip json": "state.json", "version": "manifest.json", "no manifest": "manifest.json"}.get(
        how, "tensors-00000.safetensors"
    )
    content = bytearray(file.read_bytes())
    match how:
        case "flip" | "flip json":
            content[-3] ^= 4
            file.write_bytes(content)
            return f"{file} has other content"
        case "truncate":
            file.write_bytes(content[:-1])
            return f"{file} has {len(content) - 1} bytes and should have {len(content)}"
        case "missing" | "no manifest":
            file.unlink()
            return f"{file} is missing"
    file.write_text(json.dumps(json.loads(content) | {"format": 99}))
    return f"{file} has format 99"


@pytest.mark.parametrize("how", ["flip", "flip json", "truncate", "missing", "no manifest", "version"])
def test_a_damaged_checkpoint_is_named_and_the_newest_good_one_taken(tmp_path, how):
    good, bad = save(tmp_path, 5), save(tmp_path, 6)
    problem = damage(bad, how)
    said: list[str] = []
    assert newest_good(tmp_path, said.append) == good
    assert len(said) == 1
    assert problem in said[0]
    assert f"falling back to {good}" in said[0]


def test_any_byte_counts(tmp_path):
    path = save(tmp_path, 1, state={"x": torch.ones(2), "n": 1})
    for name in read_manifest(path).files:
        content = (path / name).read_bytes()
        for place in range(0, len(content), 5):
            (path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(DamagedError, match=name):
                verify(path)
        (path / name).write_bytes(content)
    verify(path)


def test_nothing_is_begun_anew_where_all_checkpoints_are_damaged(tmp_path):
    for step in (1, 2):
        damage(save(tmp_path, step), "flip")
    with pytest.raises(DamagedError, match="no checkpoint is left to go on from: .*step-00000002.*step-00000001"):
        newest_good(tmp_path, print)
    assert newest_good(tmp_path / "empty", print) is None


def test_the_last_and_the_best_are_kept_and_the_one_just_saved_always(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.5}
    for step, loss in losses.items():
        prune(tmp_path, save(tmp_path, step, loss), keep=2)
    assert [path.name for path in steps_of(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    assert best_of(steps_of(tmp_path)) == path_of(tmp_path, 2)
    # The run has gone back to before the others.
    saved = save(tmp_path, 3)
    prune(tmp_path, saved, keep=1)
    assert steps_of(tmp_path) == [path_of(tmp_path, 2), saved]


def test_a_checkpoint_that_is_not_finished_is_not_there(tmp_path, monkeypatch):
    save(tmp_path, 1)
    writer = Writer(path_of(tmp_path, 2), STATE, Facts(2))
    writer.write_part()
    assert steps_of(tmp_path) == [path_of(tmp_path, 1)]
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_gets_the_name_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    rename, sync_directory, done = Path.rename, writing.sync_directory, []

    def watched(self, target):
        assert verify(self).step == 1
        done.append("rename")
        return rename(self, target)

    def synced(path):
        done.append(path.name)
        sync_directory(path)

    monkeypatch.setattr(Path, "rename", watched)
    monkeypatch.setattr(writing, "sync_directory", synced)
    save(tmp_path, 1)
    assert done == [".tmp-step-00000001-0", "rename", tmp_path.name]


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_rest(tmp_path, monkeypatch, broken):
    save(tmp_path, 1)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync", fail) if broken == "fsync" else (Path, "rename", fail)))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify(path_of(tmp_path, 1))


def test_a_disk_that_does_not_keep_what_it_was_given_is_noticed(tmp_path, monkeypatch):
    hash_file = files.hash_file
    monkeypatch.setattr(files, "hash_file", lambda path: files.Entry(hash_file(path).size, "0"))
    with pytest.raises(OSError, match="reads back otherwise"):
        save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_one_process_that_cannot_write_stops_all(tmp_path):
    writer = Writer(path_of(tmp_path, 1), STATE, Facts(1), Processes(0, 2, lambda ok: False))
    with pytest.raises(OSError, match="another process could not write"):
        writer.write()
    assert not list(tmp_path.iterdir())


def test_a_part_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    writer = Writer(path_of(tmp_path, 1), STATE, Facts(1), Processes(0, 2))
    with pytest.raises(OSError, match=r"process\(es\) \[1\] did not write their part"):
        writer.write_apart(timeout=0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_is_written_and_not_what_the_tensors_have_become(tmp_path, device):
    weight, copies = torch.zeros(2**22, device=device), HostCopies()
    for step in range(3):
        # The last one has another shape.
        now = weight[:5] if step == 2 else weight
        writer = Writer(path_of(tmp_path, step), {"weight": now}, Facts(step), copies=copies)
        weight += 1
        writer.write()
        assert torch.equal(read_whole(path_of(tmp_path, step))["weight"], torch.full(now.shape, float(step)))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", "", ".hidden"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": 0, "sha256": ""}
    manifest[SEAL] = _seal(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="manifest.json is damaged .*file name"):
        verify(path)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 1, state={"x": 1})
    assert read_whole(path) == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


class KilledError(BaseException):
    """The process is gone: nothing that follows is done."""


@pytest.mark.parametrize("moment", ["set aside", "replaced", "being removed"])
def test_a_kill_while_a_step_is_saved_again_costs_no_checkpoint(tmp_path, monkeypatch, moment):
    save(tmp_path, 150)
    rename, renamed = Path.rename, []

    def killed(*_, **__):
        raise KilledError

    def watched(self, target):
        renamed.append(rename(self, target))
        if len(renamed) == {"set aside": 1, "replaced": 2}.get(moment):
            killed()
        return renamed[-1]

    monkeypatch.setattr(Path, "rename", watched)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KilledError):
        save(tmp_path, 150, state={"x": 1}, session="again")
    monkeypatch.undo()
    bring_back(tmp_path)
    found = newest_good(tmp_path, pytest.fail)
    assert found == path_of(tmp_path, 150)
    assert same(read_whole(found), STATE if moment == "set aside" else {"x": 1})
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [found.name]


def test_a_step_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = Path.rename

    def full(self, target):
        if self.name.startswith(".tmp-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 1, state={"x": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert same(read_whole(path_of(tmp_path, 1)), STATE)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path, bad):
    for step, loss in enumerate([bad, 2.0, 1.0, 3.0, 4.0], 1):
        prune(tmp_path, save(tmp_path, step, loss), keep=1)
    assert steps_of(tmp_path) == [path_of(tmp_path, 3), path_of(tmp_path, 5)]
    assert best_of(steps_of(tmp_path)) == path_of(tmp_path, 3)


def test_a_moved_checkpoint_is_the_same(tmp_path):
    path = save(tmp_path, 1)
    shutil.move(path, tmp_path / "elsewhere")
    verify(tmp_path / "elsewhere")
