from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

import longnet.data.files
import longnet.data.pieces
from longnet.data.documents import SourceSpec
from longnet.data.files import text
from longnet.data.pieces import breaks_off, read_pieces

PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def write(root: Path, **contents: bytes) -> Path:
    for name, content in contents.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def read(path: Path | str, **options) -> dict[str, bytes]:
    return {document.id: document.content for document in text(SourceSpec("text", str(path), **options))}


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_a_directory_is_read_in_order_without_hidden_files_and_links(tmp_path):
    write(tmp_path, b_txt=b"two", a__c_txt=b"one", a__empty_txt=b"", _git__config=b"no")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    assert list(read(tmp_path).items()) == [("a/c.txt", b"one"), ("b.txt", b"two")]


def test_a_file_a_glob_and_patterns(tmp_path):
    write(tmp_path, a_c=b"1", b_h=b"2", x__c_c=b"3", d_o=b"4")
    assert read(tmp_path / "a.c") == {"a.c": b"1"}
    assert set(read(f"{tmp_path}/*.c").values()) == {b"1"}
    assert set(read(f"{tmp_path}/**/*.c").values()) == {b"1", b"3"}
    assert set(read(tmp_path, include=("*.c", "*.h"))) == {"a.c", "b.h", "x/c.c"}


@pytest.mark.parametrize("kind", PACKERS)
def test_compressed_files_are_read_as_what_they_hold(tmp_path, kind):
    (tmp_path / f"a.txt.{kind}").write_bytes(PACKERS[kind](b"some text"))
    assert read(tmp_path, include=("*.txt",)) == {"a.txt": b"some text"}


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz", "t.tgz", "t.tar.xz", "t.tar.bz2"])
def test_archives_hold_documents_and_nothing_is_unpacked(tmp_path, name):
    mode = {"tar": "w", "tgz": "w:gz"}.get(name.rpartition(".")[2]) or f"w:{name.rpartition('.')[2]}"
    tar(tmp_path / name, {"x/a.txt": b"1", "x/b.c": b"2"}, mode)
    assert read(tmp_path / name) == {"x/a.txt": b"1", "x/b.c": b"2"}
    assert read(tmp_path, include=("*.c",)) == {"x/b.c": b"2"}
    assert os.listdir(tmp_path) == [name]


def test_a_zip_holds_documents(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("x/a.txt", "1")
        archive.mkdir("y")
    assert read(tmp_path / "z.zip") == {"x/a.txt": b"1"}


@pytest.mark.parametrize("name", ["../a.txt", "/etc/a.txt", "x/../../a.txt", "C:\\a.txt", "..\\a.txt"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("policy", ["fatal", "skip"])
def test_members_that_climb_out_are_refused_whatever_the_policy(tmp_path, name, kind, policy):
    path = tmp_path / f"evil.{kind}"
    if kind == "tar":
        tar(path, {name: b"1"})
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(name), "1")
    with pytest.raises(ValueError, match="climbs out of the archive"):
        read(path, on_bad_input=policy)


def test_links_and_devices_in_an_archive_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        link = tarfile.TarInfo("passwords.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    assert read(tmp_path / "t.tar") == {"a.txt": b"1"}


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "t.tar.gz", "z.zip"])
def test_bombs_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(longnet.data.files, "HARMLESS_BYTES", 10_000)
    zeros, path = bytes(3_000_000), tmp_path / name
    if name == "t.tar.gz":
        tar(path, {"a.txt": zeros}, "w:gz")
    elif name == "z.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", zeros)
    else:
        path.write_bytes(PACKERS[name.rpartition(".")[2]](zeros))
    with pytest.raises(ValueError, match=rf"{name}.*unpack to more than 200 times as much"):
        read(path, on_bad_input="skip")


@pytest.mark.parametrize("name", ["a.gz", "a.xz", "a.bz2", "a.tar", "a.zip", "a.tar.gz"])
def test_broken_files_are_named_or_skipped_and_counted(tmp_path, name):
    good = gzip.compress(os.urandom(5000))
    (tmp_path / name).write_bytes(good[:-200] if name.endswith("gz") else b"nonsense" * 100)
    write(tmp_path, z_txt=b"fine")
    with pytest.raises(ValueError, match=rf"{name}: cannot be read .*on_bad_input=skip"):
        read(tmp_path)
    spec = SourceSpec("text", str(tmp_path), on_bad_input="skip")
    assert [document.content for document in text(spec)][-1] == b"fine"
    assert spec.skipped.count == 1
    assert name in str(spec.skipped)


def test_only_empty_files_are_an_error(tmp_path):
    write(tmp_path, a_txt=b"")
    with pytest.raises(ValueError, match="holds no text"):
        read(tmp_path)


@pytest.mark.parametrize("path", ["absent", "absent/*.txt"])
def test_a_place_without_files_is_named(tmp_path, path):
    with pytest.raises(ValueError, match=r"absent.*: no such file or directory; expected a file, a dir"):
        read(tmp_path / path)


def test_patterns_that_fit_nothing_are_named(tmp_path):
    write(tmp_path, a_txt=b"1")
    with pytest.raises(ValueError, match=r"none of its 1 files is in \('\*.c',\)"):
        read(tmp_path, include=("*.c",))


def test_a_long_file_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(longnet.data.pieces, "DOCUMENT_BYTES", 100)
    content = b"some words of a long text " * 40
    write(tmp_path, a_txt=content)
    documents = list(text(SourceSpec("text", str(tmp_path))))
    assert b"".join(document.content for document in documents) == content
    assert max(len(document.content) for document in documents) <= 100
    assert [document.last for document in documents] == [False] * (len(documents) - 1) + [True]


def test_every_seventh_number_is_validation(tmp_path):
    write(tmp_path, ENG18403_Trollope_txt=b"a", ENG18404_Dickens_txt=b"b", x7__none_txt=b"c")
    spec = SourceSpec("text", str(tmp_path), validation_every=7)
    assert {document.id: document.split for document in text(spec)} == {
        "ENG18403.Trollope.txt": "validation",
        "ENG18404.Dickens.txt": "train",
        "x7/none.txt": "train",
    }
    assert 18403 % 7 == 0
    assert spec.side("rows1.jsonl:14") == "validation"
    assert spec.side("rows7.jsonl:15") == "train"


def test_tei_files_are_read_as_their_text(tmp_path):
    tei = b"""<?xml version="1.0"?><TEI xmlns="x"><teiHeader><title>No</title></teiHeader>
    <text><!-- a > b --><body><head>Chapter I</head><p>It was <hi rend="i">the</hi>
      best &amp; worst.<note>An editor's.</note></p><p>Caf\xc3\xa9&#233;</p></body></text></TEI>"""
    write(tmp_path, a_xml=tei, b_xml=b"<html>no TEI</html>")
    assert read(tmp_path) == {
        "a.xml": "Chapter I\n\nIt was the best & worst.\n\nCaféé\n".encode(),
        "b.xml": b"<html>no TEI</html>",
    }


@pytest.mark.parametrize("size", range(8, 30))
@pytest.mark.parametrize("content", ["龍" * 100, "😀" * 100, "é" * 99 + " x", "ab " + "龍😀" * 40])
def test_no_piece_ends_within_a_character(content, size):
    pieces = [piece for piece, _ in read_pieces(io.BytesIO(content.encode()), size)]
    assert "".join(piece.decode() for piece in pieces) == content
    assert max(map(len, pieces)) <= size


def test_a_bad_member_of_a_zip_costs_itself_alone(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(5):
            archive.writestr(f"{number}.txt", f"member {number}")
    path.write_bytes(path.read_bytes().replace(b"member 2", b"Xember 2"))
    spec = SourceSpec("text", str(path), on_bad_input="skip")
    assert [document.id for document in text(spec)] == ["0.txt", "1.txt", "3.txt", "4.txt"]
    assert "z.zip, 2.txt: cannot be read (BadZipFile" in str(spec.skipped)


def test_what_is_lost_behind_a_break_is_told(tmp_path):
    tar(tmp_path / "t.tar", {"a.txt": b"1", "b.txt": bytes(5000)})
    (tmp_path / "t.tar").write_bytes((tmp_path / "t.tar").read_bytes()[:2000])
    spec = SourceSpec("text", str(tmp_path), on_bad_input="skip")
    assert [document.id for document in text(spec)] == ["a.txt"]
    assert "t.tar: cannot be read" in str(spec.skipped)
    assert "and everything behind it is lost" in str(spec.skipped)


def test_a_long_text_that_breaks_off_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(longnet.data.files, "UNPACKED_AT_ONCE", 100)
    monkeypatch.setattr(longnet.data.pieces, "DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(50_000))[:-20_000])
    documents = list(text(SourceSpec("text", str(tmp_path), on_bad_input="skip")))
    assert len(documents) > 2
    assert [breaks_off(document) for document in documents] == [False] * (len(documents) - 1) + [True]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_members_are_unpacked_and_the_system_s_own_are_left_out(tmp_path, kind):
    members = {f"x/{name}.txt.{name}": pack(b"text " * 99) for name, pack in PACKERS.items()}
    hidden = {"__MACOSX/a.txt": b"no", "x/.hidden.txt": b"no", ".git/a.txt": b"no"}
    archive = pack_archive(tmp_path / f"t.{kind}", members | hidden | {"./y/a.txt": b"yes"})
    assert read(archive, include=("*.txt",)) == {f"x/{name}.txt": b"text " * 99 for name in PACKERS} | {
        "y/a.txt": b"yes"
    }


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_bombs_in_archives_are_refused_also_in_many_parts(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(longnet.data.files, "HARMLESS_BYTES", 10_000)
    members = {f"{number}.txt.xz": lzma.compress(bytes(400_000)) for number in range(20)}
    archive = pack_archive(tmp_path / f"t.{kind}", members)
    with pytest.raises(ValueError, match=rf"t.{kind}.*unpack to more than 200 times as much"):
        read(archive, on_bad_input="skip")


def test_patterns_hold_for_a_single_file_too(tmp_path):
    write(tmp_path, a_txt=b"1")
    assert read(tmp_path / "a.txt", include=("*.txt",)) == {"a.txt": b"1"}
    with pytest.raises(ValueError, match=r"a.txt.*none of its 1 files is in \('\*.c',\)"):
        read(tmp_path / "a.txt", include=("*.c",))


def test_a_long_tei_file_is_read_as_its_text_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(longnet.data.pieces, "DOCUMENT_BYTES", 100)
    body = b'<p rend="x">Some words of<lb n="2"/>a novel</p>' * 20
    write(tmp_path, a_xml=b"<TEI><text>" + body + b"</text></TEI>", b_xml=b"<html>" + body * 30)
    spec = SourceSpec("text", str(tmp_path), on_bad_input="skip")
    documents = list(text(spec))
    contents = {name: b"".join(d.content for d in documents if d.id == name) for name in ("a.xml", "b.xml")}
    assert contents["a.xml"] == b"\n\n".join([b"Some words of\n\na novel"] * 20) + b"\n"
    assert contents["b.xml"] == b"<html>" + body * 30
    assert max(len(document.content) for document in documents) <= 100
    monkeypatch.setattr(longnet.data.files, "TEI_BYTES", 500)
    assert {document.id for document in text(spec)} == {"b.xml"}
    assert "a.xml: is TEI of more than 500 bytes" in str(spec.skipped)


def pack_archive(path: Path, members: dict[str, bytes]) -> Path:
    if path.suffix == ".tar":
        return tar(path, members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path
