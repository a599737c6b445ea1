from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.data.documents import SourceSpec, split_of
from longnet.data.stdlib import stdlib


def write(root: Path, *names: str, content: bytes = b"pass\n") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def at(path: Path) -> SourceSpec:
    return SourceSpec("stdlib", str(path))


def test_takes_source_and_leaves_tests_packages_and_machine_files(tmp_path):
    write(tmp_path, "os.py", "json/decoder.py", "json/__init__.py", "testing.py", "unittest/case.py", "ctypes/util.py")
    write(tmp_path, "test/a.py", "unittest/tests/b.py", "idlelib/idle_test/c.py", "lib2to3/tests/data/d.py")
    write(tmp_path, "site-packages/torch/e.py", "dist-packages/f.py", "__pycache__/g.py", "os.pyc", "LICENSE.txt")
    write(tmp_path, "_sysconfigdata__linux_x86_64-linux-gnu.py", "sitecustomize.py")
    write(tmp_path, "config-3.12-x86_64-linux-gnu/python-config.py")
    write(tmp_path, "empty/__init__.py", content=b"")
    ids = [document.id for document in stdlib(at(tmp_path))]
    assert ids == ["ctypes/util.py", "json/__init__.py", "json/decoder.py", "os.py", "testing.py", "unittest/case.py"]


def test_a_library_that_itself_lies_below_a_skipped_name_is_read(tmp_path):
    write(tmp_path / "test" / "site-packages", "os.py")
    assert [document.id for document in stdlib(at(tmp_path / "test" / "site-packages"))] == ["os.py"]


def test_contents_are_the_files_own_bytes(tmp_path):
    content = b"# -*- coding: latin-1 -*-\r\nname = '\xe9'\n"
    write(tmp_path, "latin.py", content=content)
    assert next(stdlib(at(tmp_path))).content == content


def test_the_library_of_this_python_is_found():
    documents = list(stdlib(SourceSpec("stdlib")))
    names = [document.id for document in documents]
    assert names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not any(part in {"test", "tests", "site-packages"} for name in names for part in name.split("/"))
    validation = [document for document in documents if document.split == "validation"]
    assert 0.02 < len(validation) / len(documents) < 0.1
    assert sum(len(document.content) for document in documents) > 4_000_000


@pytest.mark.parametrize("name", ["absent", "file.txt", "empty"])
def test_a_directory_without_source_is_refused_with_the_remedy(tmp_path, name):
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name}.*set path to"):
        list(stdlib(at(tmp_path / name)))


def test_the_split_is_pinned():
    # These must never change: a file that changes sides lets a resumed run train on its own validation.
    names = ["os.py", "ast.py", "gzip.py", "json/decoder.py", "urllib/request.py", "asyncio/events.py", "typing.py"]
    assert [name for name in names if split_of(name, 0.5) == "validation"] == [
        "ast.py",
        "gzip.py",
        "asyncio/events.py",
        "typing.py",
    ]


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds_to_validation(name, one, other):
    small, large = sorted((one, other))
    if split_of(name, small) == "validation":
        assert split_of(name, large) == "validation"
    assert split_of(name, 0.0) == "train"
    assert split_of(name, 1.0) == "validation"


def test_the_split_follows_the_fraction():
    names = ["/".join(parts) for parts in itertools.product("abcdefgh", repeat=4)]
    share = sum(split_of(name, 0.2) == "validation" for name in names) / len(names)
    assert 0.18 < share < 0.22


def test_include_chooses_files(tmp_path):
    write(tmp_path, "os.py", "json/decoder.py", "json/encoder.py")
    spec = SourceSpec("stdlib", str(tmp_path), include=("json/*",))
    assert [document.id for document in stdlib(spec)] == ["json/decoder.py", "json/encoder.py"]
    with pytest.raises(ValueError, match=r"holds no .py files of include=\('\*.c',\) outside its tests"):
        list(stdlib(SourceSpec("stdlib", str(tmp_path), include=("*.c",))))
