"""Documents as they come in, joined into one stream of tokens in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longnet.data.documents import Document, SourceSpec
from longnet.data.pieces import breaks_off
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
        # Pieces and bytes before the document that is open, to which a broken one is taken back.
        self._before = (1, 0)
        self._broken = False

    def add(self, document: Document, spec: SourceSpec) -> None:
        """Encode a document or a piece of one, or complain of it and drop the whole document."""
        if not self._broken:
            try:
                ids = self._encoder.encode(document.content)
            except UnicodeDecodeError as error:
                # A tokenizer decodes a long text in parts.
                at = self.num_bytes - self._before[1] + document.content.find(error.object) + error.start
                spec.complain(document.id, f"is not UTF-8 ({error.reason} at byte {at})")
                self._broken = True
            else:
                self._pieces.append(ids)
                self.num_tokens += len(ids)
                self.num_bytes += len(document.content)
        if self._broken or breaks_off(document):
            pieces, self.num_bytes = self._before
            del self._pieces[pieces:]
            self.num_tokens = self._borders[-1]
        elif document.last:
            self.num_tokens += 1
            self._pieces.append(self._eos)
            self._borders.append(self.num_tokens)
            self.documents += 1
        if document.last or breaks_off(document):
            self._before = (len(self._pieces), self.num_bytes)
            self._broken = False

    def stream(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The tokens and the borders."""
        return np.concatenate(self._pieces), np.array(self._borders, dtype=np.int64)
