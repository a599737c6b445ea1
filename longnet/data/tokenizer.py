"""Tokenizers: bytes to ids and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """What the data needs of a tokenizer. `decode` gives back exactly the bytes that `encode` took.

    `name` is for people, `digest` tells whether two tokenizers give a text the same ids; their eos may differ still.
    `encode` raises `UnicodeDecodeError` for bytes it cannot read.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...

    def __hash__(self) -> int: ...
    def encode(self, content: bytes | str) -> npt.NDArray[Any]: ...
    def decode(self, ids: npt.ArrayLike) -> bytes: ...
    def to_transformers(self, context_length: int) -> PreTrainedTokenizerBase: ...


class ByteTokenizer:
    """A token is a byte; its id is ByT5's, the byte's value plus 3.

    Any bytes survive the way there and back, also those that are no UTF-8 or that spell a special token.
    """

    name = "bytes"
    digest = "bytes"
    # 3 special ids, 256 bytes, and ByT5's 125 sentinels: no text gives a sentinel, but the ByT5Tokenizer saved beside
    # a checkpoint knows them, and 384 is also a kinder matrix size than 259.
    vocab_size = 384
    pad_id = 0
    eos_id = 1
    unk_id = 2
    _offset = 3

    def encode(self, content: bytes | str) -> npt.NDArray[np.uint16]:
        """Give the ids of the content (text as UTF-8), with no special ids added."""
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        return np.add(np.frombuffer(data, dtype=np.uint8), self._offset, dtype=np.uint16)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """Give the bytes of the ids, leaving out those that stand for no byte."""
        array = np.asarray(ids)
        is_byte = (array >= self._offset) & (array < self._offset + 256)
        return (array[is_byte] - self._offset).astype(np.uint8).tobytes()

    def to_transformers(self, context_length: int) -> PreTrainedTokenizerBase:
        """Build the tokenizer with the same ids that transformers users load from a checkpoint.

        It ends an encoded text with eos unless called with `add_special_tokens=False`, as a prompt needs.
        """
        from transformers import ByT5Tokenizer

        return ByT5Tokenizer(model_max_length=context_length)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or the directory of a Hugging Face one.

    Raises:
        ValueError: If there is none.
    """
    if name == "bytes":
        return ByteTokenizer()
    from longnet.data.hf_tokenizer import HfTokenizer

    return HfTokenizer(name)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned integers that hold every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
