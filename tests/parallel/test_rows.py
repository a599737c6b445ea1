"""Rows that several shards add to: rounded once, and everything else left as it is."""

from __future__ import annotations

import torch

from longnet.attention import DilationPattern
from longnet.parallel.rows import Layout, Totals

LAYOUT = Layout(DilationPattern((8, 64), (1, 4)), rank=1, world=4, seq_len=64, num_heads=4, num_kv_heads=4)


def test_what_is_added_bit_by_bit_is_rounded_once():
    (segment,) = LAYOUT.segments()
    x = torch.full((2, 16, 4, 8), 1.0, dtype=torch.bfloat16)
    totals = Totals(x.clone(), LAYOUT)
    rows = totals.rows(segment)
    assert rows.dtype == torch.float32
    for _ in range(4):
        # Too little for bfloat16 to tell from nothing.
        totals.add_(segment, torch.full_like(rows, 2.0**-9))
    found = totals.finish()
    assert found.dtype == torch.bfloat16
    position, head = torch.arange(16)[:, None], torch.arange(4)
    row = ((position % 4 == head)[None, :, :, None]).expand_as(x)
    assert torch.equal(found, torch.where(row, 1 + 2.0**-7, x))


def test_rows_are_read_and_written_where_they_lie():
    (segment,) = LAYOUT.segments()
    x = torch.arange(16 * 4, dtype=torch.float64).view(1, 16, 4, 1)
    totals = Totals(x.clone(), LAYOUT, keys=True)
    rows = totals.rows(segment)
    assert torch.equal(rows, segment.pack_keys(x, x)[:, :, 0])
    totals.write_(segment, -rows)
    found = totals.finish()
    changed = (found != x).sum()
    assert changed == rows.numel() - (rows == 0).sum()
    assert torch.equal(found.abs(), x)
