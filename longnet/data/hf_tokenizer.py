"""Any Hugging Face tokenizer directory as a tokenizer, and the training of a byte-level BPE one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tokenizers

from longnet.data.pieces import split_text
from longnet.data.tokenizer import token_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS, PAD = "<|endoftext|>", "<|pad|>"
# What a tokenizer without a config may call the end of a text.
_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


class HfTokenizer:
    """A directory with a `tokenizer.json`, as every fast tokenizer of the hub and `train_bpe` have it.

    A text that spells a special token is ordinary text: documents end where the data says so.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._backend = _load_backend(self.directory)
        # One process tokenizes on one core; the others are the other processes'.
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.name = self.directory.resolve().name
        self.digest = blake2b(self._backend.to_str().encode(), digest_size=8).hexdigest()
        # Ids may have gaps, and a model needs a row for the largest.
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id = self._special_id("eos_token", _KNOWN_EOS)
        self.pad_id = self._special_id("pad_token", (PAD,), default=self.eos_id)
        self._dtype = token_dtype(self.vocab_size)
        self._bytes_of: list[bytes] | None = None

    def encode(self, content: bytes | str) -> npt.NDArray[Any]:
        """Give the ids of the content, with no special ids added; long ones in pieces, so that memory stays flat."""
        data = content.encode() if isinstance(content, str) else content
        if not data:
            return np.empty(0, self._dtype)
        ids = [self._encode_piece(piece.decode("utf-8")) for piece in split_text(data)]
        return np.concatenate(ids)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """Give the bytes of the ids, special ones left out; exactly those encoded where the tokenizer is byte-level."""
        array = np.asarray(ids)
        if not isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return self._backend.decode(array.tolist(), skip_special_tokens=True).encode()
        if self._bytes_of is None:
            self._bytes_of = _byte_table(self._backend, self.vocab_size)
        table = self._bytes_of
        return b"".join([table[index] for index in array.tolist() if 0 <= index < len(table)])

    def to_transformers(self, context_length: int) -> PreTrainedTokenizerBase:
        """The tokenizer as transformers users load it from a checkpoint."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory, model_max_length=context_length)

    def save(self, directory: Path) -> None:
        """Leave a copy of the tokenizer, and of nothing else that its directory may hold."""
        directory.mkdir(exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)

    def _encode_piece(self, text: str) -> npt.NDArray[Any]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def _special_id(self, role: str, names: Iterable[str], default: int | None = None) -> int:
        config = self.directory / "tokenizer_config.json"
        given = json.loads(config.read_text()).get(role) if config.is_file() else None
        given = given.get("content") if isinstance(given, dict) else given
        for name in [given] if given else names:
            index = self._backend.token_to_id(name)
            if index is not None:
                return int(index)
        if default is not None:
            return default
        raise ValueError(
            f"tokenizer={str(self.directory)!r} has no {role}, and documents need one to end with; set {role} in its "
            "tokenizer_config.json"
        )


def train_bpe(contents: Iterable[bytes], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer; `save_pretrained` makes a directory of it.

    Args:
        contents: The texts. Bytes that are no UTF-8 become U+FFFD: they teach nothing, and any byte can be encoded
            in any case.
        vocab_size: Ids, the 256 bytes and two special ones included.

    Raises:
        ValueError: If the vocabulary is too small, or there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    least = 256 + 2
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}: expected at least {least}, for the bytes and two special ids")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = 0

    def texts() -> Iterator[str]:
        nonlocal seen
        for content in contents:
            for piece in split_text(content):
                seen += len(piece)
                yield piece.decode("utf-8", "replace")

    backend.train_from_iterator(texts(), trainer)
    if not seen:
        raise ValueError("there is no text to train a tokenizer on")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD)


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    hint = "expected bytes, or a directory with a tokenizer.json, such as save_pretrained or prepare_data.py makes"
    if not directory.is_dir():
        raise ValueError(f"tokenizer={str(directory)!r} is not a directory; {hint}")
    file = directory / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"tokenizer={str(directory)!r}: its tokenizer.json cannot be read ({error})") from None
    # Older directories hold a sentencepiece model or word lists, which transformers converts.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded: Any = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # files that make no sense to transformers end in any kind of error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tokenizer={str(directory)!r}: {reason}; {hint}") from None
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ValueError(f"tokenizer={str(directory)!r} is {type(loaded).__name__}, which has no fast form; {hint}")
    return loaded.backend_tokenizer


def _byte_table(backend: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of every id: byte-level tokens are spelled in an alphabet of 256 characters, one for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
    table = [b""] * vocab_size
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index in special:
            continue
        spelled = all(character in byte_of for character in token)
        table[index] = bytes(byte_of[character] for character in token) if spelled else token.encode()
    return table
