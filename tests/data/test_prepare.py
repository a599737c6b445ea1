from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import pickle
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import longnet.data.encoding
import longnet.data.files
import longnet.data.pieces
import longnet.data.prepare
from longnet.data import SourceSpec, TokenStore, build_corpus, tokenize
from longnet.data.hf_tokenizer import HfTokenizer
from longnet.data.prepare import input_bytes
from longnet.data.writer import StoreWriter

from .conftest import some_text


@pytest.fixture
def spec(books) -> SourceSpec:
    return SourceSpec("text", str(books), validation_fraction=0.3)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(longnet.data.encoding, "BATCH_BYTES", 1500)


def files(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}


def tokens_of(store: Path) -> dict[str, bytes]:
    return {name: content for name, content in files(store).items() if name != "manifest.json"}


@pytest.mark.parametrize("packing", ["concat", "isolate", "whole"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_store_is_the_corpus_it_was_made_of(spec, bpe, tmp_path, kind, packing):
    tokenizer = "bytes" if kind == "bytes" else str(bpe)
    prepared = tokenize(spec, tokenizer, tmp_path / "store", workers=1)
    assert prepared.how == "made"
    options = {"context_length": 64, "packing": packing}
    direct = build_corpus("text", path=spec.path, validation_fraction=0.3, tokenizer=tokenizer, **options)
    stored = build_corpus("prepared", path=str(tmp_path / "store"), tokenizer=None, **options)
    assert stored.fingerprint == direct.fingerprint
    assert stored.num_bytes == direct.num_bytes
    assert stored.documents == direct.documents
    assert stored.tokenizer.digest == direct.tokenizer.digest
    for side in ("train", "validation"):
        ours, theirs = getattr(stored, side), getattr(direct, side)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one["input_ids"].tolist() == other["input_ids"].tolist()
            assert one["labels"].tolist() == other["labels"].tolist()
            assert one.get("lengths") == other.get("lengths")
        assert stored.content(side) == direct.content(side)


def test_processes_do_not_change_the_store(spec, bpe, tmp_path):
    tokenize(spec, str(bpe), tmp_path / "one", workers=1)
    tokenize(spec, str(bpe), tmp_path / "two", workers=2)
    assert tokens_of(tmp_path / "one") == tokens_of(tmp_path / "two")


def test_a_second_run_reads_nothing_and_a_changed_input_is_noticed(books, tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    shutil.copytree(books, texts)
    spec = SourceSpec("text", str(texts), validation_fraction=0.3)
    first = tokenize(spec, "bytes", tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(longnet.data.prepare, "read_documents", None)
        assert tokenize(spec, "bytes", tmp_path / "store").how == "unchanged"
    # Touched, but the same: read once, and then known again.
    os.utime(texts / "book00.txt")
    assert tokenize(spec, "bytes", tmp_path / "store").how == "unchanged"
    with monkeypatch.context() as patch:
        patch.setattr(longnet.data.prepare, "read_documents", None)
        assert tokenize(spec, "bytes", tmp_path / "store").how == "unchanged"

    (texts / "book00.txt").write_bytes(b"something else")
    again = tokenize(spec, "bytes", tmp_path / "store")
    assert (again.how, again.because) == ("made", "the input has changed")
    assert again.manifest.input_digest != first.manifest.input_digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "texts"]
    more = tokenize(replace(spec, validation_fraction=0.5), "bytes", tmp_path / "store")
    assert more.because == "validation_fraction was 0.3, is 0.5"


def killed_after(monkeypatch, batches: int) -> None:
    """The process dies, as far as Python can show it, in the middle of writing a batch."""
    append = StoreWriter.append
    done = 0

    def dying(self, encoded, spec):
        nonlocal done
        done += 1
        if done > batches:
            file = self._files["train.tokens"]
            file.write(b"half a ba")
            file.flush()
            raise KeyboardInterrupt
        append(self, encoded, spec)

    monkeypatch.setattr(StoreWriter, "append", dying)


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_killed_run_goes_on_and_ends_the_same(spec, tmp_path, monkeypatch, batches):
    monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
    tokenize(spec, "bytes", tmp_path / "whole")
    with monkeypatch.context() as patch:
        killed_after(patch, batches)
        with pytest.raises(KeyboardInterrupt):
            tokenize(spec, "bytes", tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    with pytest.raises(ValueError, match="is not a prepared store"):
        TokenStore(tmp_path / "broken.partial")

    encoded = []
    encode = longnet.data.encoding._encode
    monkeypatch.setattr(longnet.data.encoding, "_encode", lambda *a: (encoded.append(1), encode(*a))[1])
    prepared = tokenize(spec, "bytes", tmp_path / "broken")
    assert prepared.how == ("resumed" if batches else "made")
    everything = len(list(longnet.data.encoding.batches(longnet.data.prepare.read_documents(spec))))
    assert len(encoded) == everything - batches
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    assert not (tmp_path / "broken.partial").exists()


def test_a_killed_run_begins_anew_if_the_input_has_changed_since(books, tmp_path, monkeypatch):
    monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
    texts = tmp_path / "texts"
    shutil.copytree(books, texts)
    spec = SourceSpec("text", str(texts), validation_fraction=0.3)
    for change in (lambda: (texts / "book00.txt").write_bytes(some_text(5, 20)), lambda: _keep(texts, 3)):
        with monkeypatch.context() as patch:
            killed_after(patch, 2)
            with pytest.raises(KeyboardInterrupt):
                tokenize(spec, "bytes", tmp_path / "broken")
        change()
        tokenize(spec, "bytes", tmp_path / "broken")
        tokenize(spec, "bytes", tmp_path / "whole")
        assert tokens_of(tmp_path / "broken") == tokens_of(tmp_path / "whole")
        shutil.rmtree(tmp_path / "broken")


def _keep(texts: Path, number: int) -> None:
    for path in sorted(texts.iterdir())[number:]:
        path.unlink()


def test_a_full_disk_leaves_no_store_and_says_what_to_do(spec, tmp_path, monkeypatch):
    append = StoreWriter.append

    def full(self, encoded, given):
        if self.sides["train"].documents:
            self._files["train.tokens"] = _Full()
        append(self, encoded, given)

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "append", full)
        with pytest.raises(ValueError, match=r"No space left on device. There is no store yet; make room"):
            tokenize(spec, "bytes", tmp_path / "store")
    assert not (tmp_path / "store").exists()
    tokenize(spec, "bytes", tmp_path / "store")
    tokenize(spec, "bytes", tmp_path / "other")
    assert files(tmp_path / "store") == files(tmp_path / "other")


class _Full:
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        pass


def test_an_older_store_stays_until_the_new_one_is_whole(spec, tmp_path, monkeypatch):
    tokenize(spec, "bytes", tmp_path / "store")
    before = files(tmp_path / "store")
    with monkeypatch.context() as patch:
        killed_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            tokenize(replace(spec, validation_fraction=0.5), "bytes", tmp_path / "store")
    assert files(tmp_path / "store") == before


def test_a_store_of_another_tokenizer_is_refused_and_names_both(spec, bpe, tmp_path):
    tokenize(spec, str(bpe), tmp_path / "store")
    with pytest.raises(ValueError, match=r"made with the tokenizer small-bpe .*but tokenizer='bytes' is another"):
        TokenStore(tmp_path / "store", "bytes")
    assert TokenStore(tmp_path / "store", str(bpe)).tokenizer.name == "small-bpe"
    assert TokenStore(tmp_path / "store").tokenizer.vocab_size == HfTokenizer(bpe).vocab_size


def test_a_damaged_store_is_refused(spec, tmp_path):
    store = tmp_path / "store"
    tokenize(spec, "bytes", store)
    whole = (store / "train.tokens").read_bytes()
    (store / "train.tokens").write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"train.tokens does not hold the \d+ numbers of its manifest"):
        TokenStore(store)
    (store / "train.tokens").write_bytes(whole)
    manifest = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(manifest[:40])
    with pytest.raises(ValueError, match="is damaged"):
        TokenStore(store)
    (store / "manifest.json").write_text(json.dumps(json.loads(manifest) | {"version": 99}))
    with pytest.raises(ValueError, match="has version 99, this code reads 1"):
        TokenStore(store)


def test_ids_that_do_not_fit_are_refused(spec, tmp_path, monkeypatch):
    class Large(longnet.data.tokenizer.ByteTokenizer):
        vocab_size = 70_000

    monkeypatch.setattr(longnet.data.prepare, "load_tokenizer", lambda name: Large())
    with pytest.raises(ValueError, match="dtype=uint16 holds ids up to 65535, but the tokenizer has 70000; use uint32"):
        tokenize(spec, "bytes", tmp_path / "store", dtype="uint16")
    assert not any(tmp_path.iterdir())
    assert tokenize(spec, "bytes", tmp_path / "store").manifest.dtype == "uint32"


@pytest.mark.parametrize("policy", ["fatal", "skip"])
def test_undecodable_bytes(tmp_path, bpe, policy, monkeypatch):
    for number in range(14):
        (tmp_path / f"{number}.txt").write_bytes(b"good text" if number != 5 else b"bad \xff\xfe text")
    spec = SourceSpec("text", str(tmp_path), validation_every=7, on_bad_input=policy)
    output = tmp_path.parent / f"{tmp_path.name}-store"
    if policy == "fatal":
        with pytest.raises(ValueError, match=r"5.txt: is not UTF-8 \(invalid start byte"):
            tokenize(spec, str(bpe), output)
        assert not output.exists()
    else:
        manifest = tokenize(spec, str(bpe), output).manifest
        assert (manifest.skipped, manifest.sides["train"].documents) == (1, 11)
        assert manifest.sides["train"].num_bytes == 11 * 9
        # A killed run remembers what it had left out.
        monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
        monkeypatch.setattr(longnet.data.encoding, "BATCH_BYTES", 20)
        shutil.rmtree(output)
        with monkeypatch.context() as patch:
            killed_after(patch, 4)
            with pytest.raises(KeyboardInterrupt):
                tokenize(spec, str(bpe), output)
        resumed = tokenize(spec, str(bpe), output)
        assert (resumed.how, resumed.manifest.skipped) == ("resumed", 1)
    # Bytes are bytes.
    assert tokenize(spec, "bytes", output).manifest.skipped == 0


def test_an_empty_side_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.txt").write_text("text")
    with pytest.raises(ValueError, match="validation_every=7 leaves no document for validation out of the 1"):
        tokenize(SourceSpec("text", str(tmp_path / "in"), validation_every=7), "bytes", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_places_that_cannot_be_written_are_named(spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        tokenize(spec, "bytes", tmp_path / "file" / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match="holds files that are not a store's"):
        tokenize(spec, "bytes", tmp_path / "full")


def test_two_runs_do_not_write_one_store(spec, tmp_path, bpe):
    encoder = longnet.data.load_tokenizer("bytes")
    writer = StoreWriter(tmp_path / "store", {}, encoder, "uint16")
    with pytest.raises(ValueError, match="is being written by another process"):
        tokenize(spec, "bytes", tmp_path / "store")
    writer.close()
    tokenize(spec, "bytes", tmp_path / "store")


def test_memory_stays_flat(tmp_path, monkeypatch):
    size = 40_000_000
    monkeypatch.setattr(longnet.data.encoding, "BATCH_BYTES", 2**17)
    monkeypatch.setattr(longnet.data.pieces, "DOCUMENT_BYTES", 2**17)
    (tmp_path / "0.txt").write_bytes(b"held out")
    (tmp_path / "1.txt").write_bytes(b"some words of one long document. " * (size // 33))
    spec = SourceSpec("text", str(tmp_path), validation_every=7)
    tracemalloc.start()
    prepared = tokenize(spec, "bytes", tmp_path.parent / f"{tmp_path.name}-store")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert prepared.manifest.sides["train"].documents == 1
    assert prepared.manifest.sides["train"].num_bytes > 0.99 * size
    assert peak < size / 10


def test_a_mapped_file_travels_to_a_process_by_its_name(spec, tmp_path):
    tokenize(spec, "bytes", tmp_path / "store")
    stream = TokenStore(tmp_path / "store").stream("train")
    assert stream[:3].dtype == np.uint16
    assert len(pickle.dumps(stream)) < 500 < 2 * len(stream)
    assert np.array_equal(pickle.loads(pickle.dumps(stream))[5:50], stream[5:50])


def test_what_there_is_to_read_is_known_beforehand_where_it_can_be(spec, books, tmp_path):
    assert input_bytes(spec) == sum(path.stat().st_size for path in books.iterdir())
    (tmp_path / "a.txt.gz").write_bytes(b"")
    assert input_bytes(SourceSpec("text", str(tmp_path))) is None
    assert input_bytes(SourceSpec("hf", "some/name")) is None
    assert input_bytes(SourceSpec("stdlib")) > 1_000_000


def test_a_store_does_not_lie_in_its_own_input(books, tmp_path):
    texts = tmp_path / "texts"
    shutil.copytree(books, texts)
    (tmp_path / "link").symlink_to(texts)
    for path in (texts, tmp_path / "link", texts / "**" / "*"):
        with pytest.raises(ValueError, match="output=.*texts/sub/store' lies in path=.*, which would read it; choose"):
            tokenize(SourceSpec("text", str(path), validation_fraction=0.3), "bytes", texts / "sub" / "store")
    assert sorted(path.name for path in texts.iterdir()) == sorted(path.name for path in books.iterdir())
    flat = SourceSpec("text", str(texts / "*.txt"), validation_fraction=0.3)
    assert tokenize(flat, "bytes", texts / "store").how == "made"


def test_another_end_of_documents_is_another_store(spec, bpe, other_eos, tmp_path, monkeypatch):
    store = tmp_path / "store"
    tokenize(spec, str(bpe), store)
    with pytest.raises(ValueError, match=r"small-bpe .*eos 1\), but tokenizer=.* is another .*eos 0\)"):
        TokenStore(store, str(other_eos))
    assert tokenize(spec, str(other_eos), store).because == "eos_id was 1, is 0"
    assert TokenStore(store).tokenizer.eos_id == 0
    # Nor does a killed run go on with another.
    monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
    with monkeypatch.context() as patch:
        killed_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            tokenize(spec, str(bpe), tmp_path / "broken")
    assert tokenize(spec, str(other_eos), tmp_path / "broken").how == "made"
    assert tokens_of(tmp_path / "broken") == tokens_of(store)


@pytest.mark.parametrize("name", ["train.tokens", "validation.borders"])
def test_a_store_that_lost_a_file_is_not_unchanged(spec, tmp_path, name):
    tokenize(spec, "bytes", tmp_path / "store")
    (tmp_path / "store" / name).unlink()
    with pytest.raises(ValueError, match=f"{name} does not hold the .*; delete the store and prepare it again"):
        tokenize(spec, "bytes", tmp_path / "store")


def test_an_output_that_cannot_be_is_told_before_any_work(spec, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(longnet.data.prepare, "input_stamp", None)
    for output in ("file", "file/store"):
        with pytest.raises(ValueError, match="output=.* cannot be written: .*file' is not a directory; choose another"):
            tokenize(spec, "bytes", tmp_path / output)


def test_an_output_may_be_the_directory_one_is_in(spec, tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path / "store")
    assert tokenize(spec, "bytes", ".").how == "made"
    assert TokenStore(tmp_path / "store").manifest.sides["train"].documents


NUMBERS = "".join(f"{number**7:x} " for number in range(1000)).encode()


@pytest.fixture
def broken(tmp_path, monkeypatch) -> SourceSpec:
    """Long texts, two of which break off and one of which has a bad byte in the middle, among good ones."""
    monkeypatch.setattr(longnet.data.files, "UNPACKED_AT_ONCE", 100)
    monkeypatch.setattr(longnet.data.pieces, "DOCUMENT_BYTES", 200)
    monkeypatch.setattr(longnet.data.pieces, "ENCODED_BYTES", 60)
    monkeypatch.setattr(longnet.data.encoding, "BATCH_BYTES", 500)
    root = tmp_path / "in"
    root.mkdir()
    for number in range(16):
        (root / f"{number:02}.txt").write_bytes(some_text(number, 300))
    for number in (3, 15):
        packed = gzip.compress(NUMBERS, 1)
        (root / f"{number:02}.txt").unlink()
        (root / f"{number:02}.txt.gz").write_bytes(packed[: len(packed) // 2])
    (root / "05.txt").write_bytes(some_text(1, 200) + b" \xff " + some_text(2, 200) + b" \xff")
    return SourceSpec("text", str(root), validation_every=7, on_bad_input="skip")


def whole_documents(spec: SourceSpec, split: str) -> list[bytes]:
    good = (path for path in sorted(Path(spec.path).iterdir()) if path.suffix == ".txt" and path.name != "05.txt")
    return [path.read_bytes() for path in good if (int(path.stem) % 7 == 0) == (split == "validation")]


@pytest.mark.parametrize("batches", [None, 5, 12, 25, 32])
def test_a_document_that_breaks_off_is_left_out_whole(broken, bpe, tmp_path, monkeypatch, batches):
    monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
    if batches is not None:
        with monkeypatch.context() as patch:
            killed_after(patch, batches)
            with pytest.raises(KeyboardInterrupt):
                tokenize(broken, str(bpe), tmp_path / "store", workers=1)
    prepared = tokenize(broken, str(bpe), tmp_path / "store", workers=1)
    assert prepared.manifest.skipped == 3
    store = TokenStore(tmp_path / "store")
    direct = build_corpus("text", tokenizer=str(bpe), context_length=64, packing="whole", **options(broken))
    stored = build_corpus("prepared", path=str(tmp_path / "store"), tokenizer=None, context_length=64, packing="whole")
    assert "3 skipped" in direct.skipped
    assert stored.fingerprint == direct.fingerprint
    assert stored.num_bytes == direct.num_bytes
    assert [row["lengths"] for row in stored.train] == [row["lengths"] for row in direct.train]
    for split in ("train", "validation"):
        stream, borders = store.stream(split)[:], store.borders(split)
        found = [store.tokenizer.decode(stream[a + 1 : b]) for a, b in itertools.pairwise(borders)]
        assert found == whole_documents(broken, split)
        assert borders[-1] == len(stream) - 1
        assert store.manifest.sides[split].num_bytes == sum(map(len, found))
        digest = longnet.data.store.StreamDigest()
        digest.update(stream)
        assert digest.hexdigest() == store.manifest.sides[split].digest


def test_a_kill_behind_a_document_that_was_taken_back(broken, tmp_path, monkeypatch):
    checkpoint = StoreWriter.checkpoint
    with monkeypatch.context() as patch:
        # The journal stays where the document that will break off is open, and the writer goes on behind it.
        patch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
        patch.setattr(StoreWriter, "checkpoint", lambda self, n, chain: n <= 12 and checkpoint(self, n, chain))
        killed_after(patch, 45)
        with pytest.raises(KeyboardInterrupt):
            tokenize(broken, "bytes", tmp_path / "store")
    # It is whole the next time.
    (Path(broken.path) / "03.txt.gz").write_bytes(gzip.compress(NUMBERS, 1))
    tokenize(broken, "bytes", tmp_path / "store")
    tokenize(broken, "bytes", tmp_path / "whole")
    assert files(tmp_path / "store") == files(tmp_path / "whole")


def options(spec: SourceSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in ("path", "validation_every", "on_bad_input")}


def test_a_bad_byte_is_named_by_its_place_in_the_document(broken, bpe):
    path, place = f"{broken.path}/05.txt", len(some_text(1, 200)) + 1
    with pytest.raises(ValueError, match=rf"05.txt: is not UTF-8 .* at byte {place}\)"):
        build_corpus("text", path=path, validation_every=7, tokenizer=str(bpe), context_length=8)


def test_files_shorter_than_their_journal_are_begun_anew(spec, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(longnet.data.prepare, "_JOURNAL_EVERY", -1.0)
    tokenize(spec, "bytes", tmp_path / "whole")
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            tokenize(spec, "bytes", tmp_path / "store")
    os.truncate(tmp_path / "store.partial" / "train.tokens", 100)
    assert tokenize(spec, "bytes", tmp_path / "store").how == "made"
    assert "train.tokens" in capsys.readouterr().err
    assert files(tmp_path / "store") == files(tmp_path / "whole")
