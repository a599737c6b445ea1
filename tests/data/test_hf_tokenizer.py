from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longnet.data.pieces
from longnet.data.hf_tokenizer import HfTokenizer, train_bpe
from longnet.data.pieces import cut_point, read_pieces, split_text
from longnet.data.tokenizer import load_tokenizer

from .conftest import some_text


@pytest.fixture(scope="module")
def tokenizer(bpe) -> HfTokenizer:
    return HfTokenizer(bpe)


@given(text=st.text() | st.sampled_from(["a <|endoftext|> b <|pad|>", " x\r\ny", "\U0001f600"]))
def test_any_text_survives_exactly_and_spells_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode()
    assert not {tokenizer.eos_id, tokenizer.pad_id} & set(ids.tolist())


def test_bytes_that_are_no_text_are_refused(tokenizer):
    with pytest.raises(UnicodeDecodeError):
        tokenizer.encode(b"good \xff bad")


def test_cut_characters_decode_to_the_bytes_they_are(tokenizer):
    ids = tokenizer.encode("\U0001f600\U0001f601")
    assert b"".join(tokenizer.decode([index]) for index in ids.tolist()) == "\U0001f600\U0001f601".encode()


def test_agrees_with_transformers(tokenizer):
    theirs = tokenizer.to_transformers(512)
    text = some_text(99, 100).decode()
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text).tolist()
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert theirs.model_max_length == 512
    assert len(theirs) == tokenizer.vocab_size


def test_a_copy_is_the_same_tokenizer_wherever_it_lies(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "copy")
    copy = HfTokenizer(tmp_path / "copy")
    assert copy.digest == tokenizer.digest
    assert (copy.eos_id, copy.pad_id, copy.vocab_size) == (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size)


def test_training_takes_bytes_that_are_no_text(tmp_path):
    train_bpe([b"good \xff\xfe bad " * 50, b"more"], vocab_size=270).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).decode(load_tokenizer(str(tmp_path)).encode("zzz é")) == "zzz é".encode()


@pytest.mark.parametrize(
    ("contents", "size", "message"),
    [([b"x"], 257, "vocab_size=257: expected at least 258"), ([], 300, "no text"), ([b""], 300, "no text")],
)
def test_training_that_cannot_be_is_refused(contents, size, message):
    with pytest.raises(ValueError, match=message):
        train_bpe(contents, size)


def test_a_directory_that_holds_no_tokenizer_is_refused(bpe, tmp_path):
    with pytest.raises(ValueError, match="'nowhere' is not a directory; expected bytes, or"):
        load_tokenizer("nowhere")
    with pytest.raises(ValueError, match="expected bytes, or a directory with a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="its tokenizer.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(bpe, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bpe, broken)
    config = json.loads((broken / "tokenizer_config.json").read_text())
    (broken / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<none>"}))
    with pytest.raises(ValueError, match="has no eos_token, and documents need one"):
        load_tokenizer(str(broken))


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode), st.integers(8, 60))
def test_pieces_are_the_whole(data, size):

    pieces = list(split_text(data, size))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= size for piece in pieces) or data == b""
    streamed = list(read_pieces(io.BytesIO(data), size))
    assert b"".join(piece for piece, _ in streamed) == data
    assert [last for _, last in streamed] == [False] * (len(streamed) - 1) + [True] * bool(streamed)
    assert all(0 < len(piece) <= size for piece, _ in streamed)


@given(st.text(min_size=10, max_size=200), st.integers(8, 60))
def test_pieces_of_text_are_text(text, size):
    for piece in split_text(text.encode(), size):
        piece.decode()


@given(st.lists(st.sampled_from(["word", "two", "  ", "\n", "é", "x1", " .", "'s", "\u00a0", " "]), max_size=120))
def test_pieces_have_the_tokens_of_the_whole(tokenizer, words):
    text = " ".join(words).encode()
    whole = tokenizer._encode_piece(text.decode())
    pieces = [tokenizer._encode_piece(piece.decode()) for piece in split_text(text, 64)]
    # A cut without such a place is the one case in which tokens may differ.
    if all(cut_point(text[at : at + 64]) < 64 for at in range(0, max(len(text) - 64, 1), 64) if len(text) > 64):
        assert np.concatenate(pieces).tolist() == whole.tolist()


@pytest.mark.parametrize("size", range(40, 72, 3))
def test_no_cut_goes_through_a_run_of_spaces(tokenizer, size):
    text = b"word one    two\n\n three four   \n five" * 8
    whole = tokenizer._encode_piece(text.decode())
    pieces = [tokenizer._encode_piece(piece.decode()) for piece in split_text(text, size)]
    assert np.concatenate(pieces).tolist() == whole.tolist()


def test_long_texts_are_encoded_in_pieces(tokenizer, monkeypatch):
    text = some_text(3, 3000)
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(longnet.data.pieces, "ENCODED_BYTES", 500)
    assert tokenizer.encode(text).tolist() == whole
