"""Best-fit packing: which pieces of documents share a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt


def best_fit(borders: npt.NDArray[np.int64], context_length: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Fit the documents between borders into rows, cutting only those that are longer than a row.

    Longest first, each into the row it fills best: at most 11/9 of the fewest rows possible, plus one.

    Returns:
        The pieces (start, end) of all rows, and where each row's pieces begin among them, with their number last.
        Rows are in the order of their first piece, and pieces within a row in the stream's order.
    """
    starts, ends = borders[:-1], borders[1:]
    whole_rows = np.maximum((ends - starts - 1) // context_length, 0)
    rows: list[list[tuple[int, int]]] = []
    for document in np.flatnonzero(whole_rows):
        first = int(starts[document])
        rows += [
            [(first + row * context_length, first + (row + 1) * context_length)]
            for row in range(int(whole_rows[document]))
        ]
    starts = starts + whole_rows * context_length
    lengths = ends - starts
    room: list[int] = []
    rows_with: dict[int, list[int]] = {}
    for document in np.argsort(-lengths, kind="stable"):
        length = int(lengths[document])
        at = bisect_left(room, length)
        if at == len(room):
            row, left = len(rows), context_length
            rows.append([])
        else:
            left = room[at]
            row = rows_with[left].pop()
            if not rows_with[left]:
                del rows_with[left], room[at]
        rows[row].append((int(starts[document]), int(ends[document])))
        if left := left - length:
            if left not in rows_with:
                rows_with[left] = []
                insort(room, left)
            rows_with[left].append(row)
    rows = sorted(map(sorted, rows))
    pieces = np.array([piece for row in rows for piece in row], dtype=np.int64).reshape(-1, 2)
    return pieces, np.cumsum([0, *map(len, rows)], dtype=np.int64)
