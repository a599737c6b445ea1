"""Documents to ids on several cores, in order, with a bounded number of them in memory."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longnet.data.documents import Document
from longnet.data.tokenizer import Tokenizer, load_tokenizer

# Enough work to be worth sending to a process, little enough to be held a few times over for each.
BATCH_BYTES = 4 * 2**20


@dataclass
class Encoded:
    """The ids of some documents in one array, and how many each has.

    Attributes:
        documents: What was encoded.
        ids: All their ids.
        lengths: How many of them are each document's.
        errors: Why a document has none, by its place in `documents`.
    """

    documents: list[Document]
    ids: npt.NDArray[Any]
    lengths: list[int]
    errors: dict[int, str]


def batches(documents: Iterable[Document], size: int | None = None) -> Iterator[list[Document]]:
    """Yield documents in lists of about `size` bytes."""
    size = size or BATCH_BYTES
    held: list[Document] = []
    held_bytes = 0
    for document in documents:
        held.append(document)
        held_bytes += len(document.content)
        # Thousands of tiny documents are work too.
        if held_bytes >= size or len(held) >= 4096:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def encode_all(groups: Iterable[list[Document]], tokenizer: Tokenizer, name: str, workers: int) -> Iterator[Encoded]:
    """Encode lists of documents, in order.

    Args:
        groups: What `batches` yields.
        tokenizer: Encodes in this process where there are no workers.
        name: The tokenizer's name or directory, for the other processes to load it.
        workers: Processes; with 0 or 1, or for bytes, which cost less to encode than to send, it is done here.
    """
    if workers <= 1 or name == "bytes":
        for documents in groups:
            yield Encoded(documents, *_encode([document.content for document in documents], tokenizer))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (name,)) as pool:
        waiting: deque[tuple[list[Document], Future[Any]]] = deque()
        try:
            for documents in groups:
                waiting.append((documents, pool.submit(_work, [document.content for document in documents])))
                if len(waiting) >= 2 * workers:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        except BrokenProcessPool:
            raise ValueError(
                f"workers={workers}: the system ended a process that tokenizes, most likely for want of memory; give "
                "the same command with fewer workers, which goes on where this one stopped"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(documents: list[Document], future: Future[Any]) -> Encoded:
    return Encoded(documents, *future.result())


_tokenizer: Tokenizer


def _start_worker(name: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(name)


def _work(contents: list[bytes]) -> tuple[npt.NDArray[Any], list[int], dict[int, str]]:
    return _encode(contents, _tokenizer)


def _encode(contents: list[bytes], tokenizer: Tokenizer) -> tuple[npt.NDArray[Any], list[int], dict[int, str]]:
    encoded, errors = [], {}
    for place, content in enumerate(contents):
        try:
            encoded.append(tokenizer.encode(content))
        except UnicodeDecodeError as error:
            encoded.append(tokenizer.encode(b""))
            errors[place] = f"is not UTF-8 ({error.reason}: {error.object[error.start : error.start + 4]!r})"
    return np.concatenate(encoded), [len(ids) for ids in encoded], errors
