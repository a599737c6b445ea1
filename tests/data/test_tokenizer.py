from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longnet.data.tokenizer import ByteTokenizer

AWKWARD = [b"", bytes(range(256)), b"a <pad> b</s>\n<extra_id_0>", b"\xff\xfe\x00", "naïve £\U0001f600".encode()]


@given(st.binary() | st.sampled_from(AWKWARD))
def test_any_bytes_survive(content):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(content)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [byte + 3 for byte in content]
    assert tokenizer.decode(ids) == content
    assert tokenizer.decode(ids.tolist()) == content


def test_decode_leaves_out_what_is_no_byte():
    assert ByteTokenizer().decode([1, 0, 3 + ord("a"), 2, 258, 259, 383, 3 + ord("b")]) == b"a\xffb"


def test_text_is_utf8_and_keeps_escaped_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("é")) == b"\xc3\xa9"
    assert tokenizer.decode(tokenizer.encode(b"\xff".decode("utf-8", "surrogateescape"))) == b"\xff"


def test_agrees_with_transformers_after_a_round_trip_through_a_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = ByteTokenizer()
    ours.to_transformers(context_length=4096).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)

    text = "def naïve(x):\n    return '£' + x\t# \U0001f600\n"
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
    assert theirs.decode(ours.encode(text).tolist()) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (ours.pad_id, ours.eos_id, ours.unk_id)
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 4096
