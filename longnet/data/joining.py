"""Documents as they come in, joined into one stream of tokens in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longnet.data.documents import Document, SourceSpec
from longnet.data.tokenizer import Tokenizer, token_dtype


class StreamBuilder:
    """Builds `eos document eos document eos ...` and the positions of its eos.

    The first eos is there so that the first token of the first document, too, has something to be predicted from.
    """

    def __init__(self, encoder: Tokenizer) -> None:
        self.documents = self.num_bytes = self.num_tokens = 0
        self._encoder = encoder
        self._eos = np.array([encoder.eos_id], dtype=token_dtype(encoder.vocab_size))
        self._pieces: list[npt.NDArray[Any]] = [self._eos]
        self._borders = [0]
        self._open = False

    def add(self, document: Document, spec: SourceSpec) -> None:
        """Encode a document, or complain of it."""
        try:
            ids = self._encoder.encode(document.content)
        except UnicodeDecodeError as error:
            spec.complain(document.id, f"is not UTF-8 ({error.reason} at byte {error.start})")
        else:
            self._pieces.append(ids)
            self.num_tokens += len(ids)
            self.num_bytes += len(document.content)
            self._open = True
        if document.last and self._open:
            self.num_tokens += 1
            self._pieces.append(self._eos)
            self._borders.append(self.num_tokens)
            self.documents += 1
            self._open = False

    def stream(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The tokens and the borders."""
        return np.concatenate(self._pieces), np.array(self._borders, dtype=np.int64)
