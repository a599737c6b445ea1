"""What two things that learn nothing of language reach on the bytes a model is judged by."""

from __future__ import annotations

import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

_WINDOW = 64 * 2**20  # how far back preset 9 can refer


@dataclass(frozen=True)
class Baselines:
    """Bits per byte on the same bytes; lower is better.

    Attributes:
        num_bytes: How many bytes were measured.
        unigram: Code length under the training bytes' frequencies: knows how common each byte is, nothing of order.
        xz: `xz -9e` on these bytes alone, as one stream, container included.
        xz_given_train: What these bytes add to an xz of the training bytes, which is the fairer rival of a model that
            has read them; None where it was not asked for.
    """

    num_bytes: int
    unigram: float
    xz: float
    xz_given_train: float | None = None


def measure_baselines(validation: bytes, train: bytes, *, given_train: bool = False) -> Baselines:
    """Measure the baselines on the bytes that a validation loss was measured on.

    Args:
        validation: The bytes to code.
        train: The bytes the model was trained on.
        given_train: Also measure `xz_given_train`: about a second per MB of training bytes, on two cores.
    """
    if not validation or not train:
        raise ValueError(f"validation and train must not be empty; they have {len(validation)} and {len(train)} bytes")
    return Baselines(
        num_bytes=len(validation),
        unigram=unigram_bits_per_byte(validation, train),
        xz=8 * _xz_size(validation) / len(validation),
        xz_given_train=xz_bits_per_byte_given_train(validation, train) if given_train else None,
    )


def unigram_bits_per_byte(validation: bytes, train: bytes) -> float:
    """Code length of the validation bytes under the training counts, one added to each of the 256.

    The one added keeps a byte that training never had codable; the validation bytes' own frequencies are not used.
    """
    train_counts = np.bincount(np.frombuffer(train, dtype=np.uint8), minlength=256) + 1
    validation_counts = np.bincount(np.frombuffer(validation, dtype=np.uint8), minlength=256)
    bits = -np.log2(train_counts / train_counts.sum())
    return float(validation_counts @ bits / len(validation))


def xz_bits_per_byte_given_train(validation: bytes, train: bytes) -> float:
    """How much longer the xz of the training bytes grows when the validation bytes follow.

    Training bytes beyond xz's 64 MiB window are left out: they could not be referred to.
    """
    prefix = train[-_WINDOW:]
    # lzma releases the GIL, so the two streams take the time of one.
    with ThreadPoolExecutor(max_workers=2) as pool:
        alone, both = pool.map(_xz_size, (prefix, prefix + validation))
    return 8 * (both - alone) / len(validation)


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))
