"""Rows put together from pieces of rows, for the short contexts that a training begins with."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from longnet.data.mixture import MixedRows, Rows
from longnet.data.packing import Row
from longnet.data.sampling import Index


class GrowingRows(Dataset[Row]):
    """The rows of a corpus, by what a `GrowingOrder` gives.

    Args:
        rows: The whole rows, which are cut nowhere but at the ends of pieces.
    """

    def __init__(self, rows: Rows | MixedRows) -> None:
        self.rows = rows

    def __getitem__(self, index: Index) -> Row:
        if isinstance(index, int):
            return self.rows[index]
        pieces = [self.rows.piece(*piece) for piece in index]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
