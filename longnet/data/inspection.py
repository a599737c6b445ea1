"""How long the documents of a store are: in numbers, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longnet.data.documents import SPLITS
from longnet.data.store import TokenStore

_BAR = 40


def document_lengths(store: TokenStore) -> npt.NDArray[np.int64]:
    """Tokens of every document, both sides, without the eos that ends it."""
    return np.concatenate([np.diff(store.borders(split)) - 1 for split in SPLITS])


def describe(store: TokenStore, long: int) -> str:
    """A histogram by powers of two, with the share of the tokens, and how much lies in long documents."""
    lengths = document_lengths(store)
    total = max(int(lengths.sum()), 1)
    source, tokenizer = store.manifest.source, store.manifest.tokenizer
    sides = store.manifest.sides
    lines = [
        f"source     {source['source']} at {source['path']}",
        f"tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']:,} ids, {store.manifest.dtype}",
        *(
            f"{split:<10} {sides[split].documents:,} documents, {sides[split].num_bytes / 1e6:,.1f} MB, "
            f"{sides[split].tokens - 1:,} tokens"
            for split in SPLITS
        ),
        f"bytes/token {sum(side.num_bytes for side in sides.values()) / total:.2f}",
        "",
        f"{'tokens':>21}  {'documents':>9}  share of all tokens",
    ]
    edges, counts, sums = _histogram(lengths)
    for low, high, count, tokens in zip(edges[:-1], edges[1:], counts, sums, strict=True):
        share = tokens / total
        bar = "#" * round(share * _BAR)
        lines.append(f"{low:>9,} - {high - 1:>9,}  {count:>9,}  {share:>6.1%} {bar}".rstrip())
    in_long = int(lengths[lengths >= long].sum())
    lines += [
        "",
        f"median {int(np.median(lengths)):,}, mean {lengths.mean():,.0f}, longest {lengths.max():,} tokens",
        f"{(lengths >= long).sum():,} documents of at least {long:,} tokens hold {in_long / total:.1%} of all tokens",
    ]
    return "\n".join(lines)


def plot_lengths(store: TokenStore, target: Path, long: int) -> None:
    """Draws the histogram: how many documents, and where the tokens lie."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = document_lengths(store)
    edges, counts, sums = _histogram(lengths)
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    middle = np.arange(len(counts))
    for offset, values, label in ((-0.2, counts, "documents"), (0.2, sums, "tokens")):
        axes.bar(middle + offset, np.array(values) / max(sum(values), 1), width=0.4, label=f"share of {label}")
    if edges[0] <= long <= edges[-1]:
        axes.axvline(np.log2(max(long, 1)) - np.log2(edges[0] or 1) - 0.5, color="#57606a", linestyle="--", linewidth=1)
    axes.set_xticks(middle, [f"{edge:,}" for edge in edges[:-1]], rotation=45, ha="right")
    axes.set(xlabel="tokens of a document, at least", title=f"{store.path.name}: lengths of {len(lengths):,} documents")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.25, axis="y")
    axes.legend()
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _histogram(lengths: npt.NDArray[np.int64]) -> tuple[list[int], list[int], list[Any]]:
    """Powers of two around the lengths, and the documents and tokens between them."""
    bits = np.log2(np.maximum(lengths, 1)).astype(int)
    low, high = int(bits.min()), int(bits.max())
    counts = np.bincount(bits - low, minlength=high - low + 1)
    sums = np.bincount(bits - low, weights=lengths, minlength=high - low + 1).astype(np.int64)
    return [2**power for power in range(low, high + 2)], counts.tolist(), sums.tolist()
