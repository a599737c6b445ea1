"""From the words of a config to a corpus: reads, tokenizes, splits and packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from longnet.data.corpus import Corpus
from longnet.data.documents import SPLITS, Document, Source, SourceSpec, Split, taken_by, wrong_options
from longnet.data.joining import StreamBuilder
from longnet.data.mixture import MixedRows, Rows
from longnet.data.packing import PackedRows, TokenStream, pack
from longnet.data.sampling import MixtureOrder
from longnet.data.sources import SOURCES
from longnet.data.store import StreamDigest, TokenStore, fingerprint
from longnet.data.stream import RowStream
from longnet.data.synthetic import TASKS
from longnet.data.synthetic_rows import SyntheticRows
from longnet.data.tokenizer import Tokenizer, load_tokenizer

SPEC_FIELDS = {entry.name for entry in fields(SourceSpec)} - {"source", "skipped"}


def build_corpus(
    source: str,
    *,
    context_length: int,
    tokenizer: str | None = "bytes",
    packing: str = "concat",
    seed: int = 0,
    samples: int = 10_000,
    validation_samples: int = 64,
    answer_only: bool = False,
    sample_lengths: Sequence[int] | None = None,
    block_rows: int = 256,
    mixture: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Corpus:
    """Read, tokenize, split and pack a corpus.

    Args:
        source: A name in `SOURCES`, `prepared`, `mixture`, or a name in `TASKS`.
        context_length: Tokens in a row.
        tokenizer: `bytes`, or a tokenizer's directory; None takes a prepared store's own, else bytes.
        packing: A name in `PACKINGS`.
        seed: Chooses the samples of a task, and the order of a stream.
        samples: Rows of a task, to train on.
        validation_samples: Rows of a task, or of a stream, that are kept for validation.
        answer_only: Whether a task's labels are those of its answer alone.
        sample_lengths: Tokens of a task's samples, by row in turn; None has one sample fill a row.
        block_rows: Rows of a stream that are shuffled among each other.
        mixture: The parts of a mixture: a `weight` and a source with its options each.
        options: Fields of `SourceSpec`.

    Raises:
        ValueError: If a name is unknown, a number out of range, or a side is empty or shorter than one context.
    """
    if unknown := set(options) - SPEC_FIELDS:
        raise ValueError(f"{sorted(unknown)} are not options of a source; there are {', '.join(sorted(SPEC_FIELDS))}")
    # A word stays one, for the spec to refuse: its letters would be patterns.
    if options.get("include") is not None and not isinstance(options["include"], str):
        options["include"] = tuple(options["include"])
    if source == "mixture":
        shared = {"context_length": context_length, "packing": packing, "seed": seed, "samples": samples}
        shared |= {"validation_samples": validation_samples, "answer_only": answer_only}
        shared |= {"sample_lengths": sample_lengths}
        return _mix(mixture, tokenizer, shared, options)
    spec = SourceSpec(source, **options)
    if source == "prepared":
        return _from_store(spec, tokenizer, context_length, packing)
    encoder = load_tokenizer(tokenizer or "bytes")
    if source in TASKS:
        rows = partial(
            SyntheticRows,
            source,
            encoder,
            context_length,
            seed=seed,
            answer_only=answer_only,
            isolated=packing != "concat",
            sample_lengths=sample_lengths,
        )
        words = f"{source}/{seed}/{context_length}/{samples}/{validation_samples}/{answer_only}"
        if sample_lengths is not None:
            words += f"/{list(sample_lengths)}"
        return _from_task(rows, samples, validation_samples, words)
    read = _look_up("source", source, SOURCES)
    if spec.streaming:
        return _from_stream(spec, read, encoder, context_length, packing, block_rows, validation_samples, seed)
    return _from_documents(spec, read, encoder, context_length, packing)


def _from_documents(spec: SourceSpec, read: Source, encoder: Tokenizer, context_length: int, packing: str) -> Corpus:
    tokens: dict[Split, StreamBuilder] = {split: StreamBuilder(encoder) for split in SPLITS}
    for document in read(spec):
        tokens[document.split].add(document, spec)
    documents: dict[Split, int] = {split: tokens[split].documents for split in SPLITS}
    if not sum(documents.values()):
        raise ValueError(f"source={spec.where} has no documents; set path to where there are some")
    streams = {split: tokens[split].stream() for split in SPLITS}
    digests: dict[Split, str] = {}
    for split in SPLITS:
        digest = StreamDigest()
        digest.update(streams[split][0])
        digests[split] = digest.hexdigest()
    rows = _pack_sides(spec, streams, documents, context_length, packing, encoder)
    return Corpus(
        source=spec.source,
        tokenizer=encoder,
        train=rows["train"],
        validation=rows["validation"],
        documents=documents,
        num_bytes={split: tokens[split].num_bytes for split in SPLITS},
        fingerprint=fingerprint(encoder.digest, digests),
        skipped=str(spec.skipped) if spec.skipped.count else "",
    )


def _from_store(spec: SourceSpec, tokenizer: str | None, context_length: int, packing: str) -> Corpus:
    if spec.path is None:
        raise ValueError("path=None: source=prepared needs the directory of a store; set path")
    store = TokenStore(spec.path, tokenizer)
    sides = store.manifest.sides
    documents: dict[Split, int] = {split: sides[split].documents for split in SPLITS}
    streams = {split: (store.stream(split), store.borders(split)) for split in SPLITS}
    rows = _pack_sides(spec, streams, documents, context_length, packing, store.tokenizer)
    return Corpus(
        source=spec.source,
        tokenizer=store.tokenizer,
        train=rows["train"],
        validation=rows["validation"],
        documents=documents,
        num_bytes={split: sides[split].num_bytes for split in SPLITS},
        fingerprint=fingerprint(store.tokenizer.digest, {split: sides[split].digest for split in SPLITS}),
    )


def _from_task(build: Callable[..., SyntheticRows], samples: int, validation_samples: int, words: str) -> Corpus:
    validation = build(validation_samples)
    encoder = validation.tokenizer
    return Corpus(
        source=validation.task,
        tokenizer=encoder,
        train=build(samples, first=validation_samples),
        validation=validation,
        documents={"train": samples, "validation": validation_samples},
        num_bytes={"validation": len(encoder.decode(validation.predicted()))},
        fingerprint=fingerprint(encoder.digest, {"train": words, "validation": words}),
    )


def _from_stream(
    spec: SourceSpec,
    read: Source,
    encoder: Tokenizer,
    context_length: int,
    packing: str,
    block_rows: int,
    validation_rows: int,
    seed: int,
) -> Corpus:
    held = StreamBuilder(encoder)
    for document in read(spec):
        if document.split == "validation":
            held.add(document, spec)
            if held.num_tokens > validation_rows * context_length and document.last:
                break
        elif spec.validation_split is not None:
            # That split comes first, so it is over; the other may have no end.
            break
    stream, borders = held.stream()
    if held.num_tokens < context_length:
        raise ValueError(
            f"context_length={context_length} is longer than the {held.num_tokens} validation tokens of the stream "
            f"{spec.where}; shorten it, or change {spec.rule}"
        )
    validation = pack(packing, stream, borders, context_length, encoder.pad_id)
    digest = StreamDigest()
    digest.update(stream)
    # A dataset of the hub is known by its name; files may lie elsewhere tomorrow.
    known = spec if spec.source == "hf" else replace(spec, path=None)
    words = f"{known}/{packing}/{block_rows}/{seed}"
    return Corpus(
        source=spec.source,
        tokenizer=encoder,
        train=RowStream(
            partial(_train_documents, read, spec), encoder, context_length, packing, block_rows, seed, spec.complain
        ),
        validation=validation,
        documents={"validation": held.documents},
        num_bytes={"validation": held.num_bytes},
        fingerprint=fingerprint(encoder.digest, {"train": words, "validation": digest.hexdigest()}),
    )


def _mix(
    parts: Sequence[Mapping[str, Any]], tokenizer: str | None, shared: dict[str, Any], options: dict[str, Any]
) -> Corpus:
    if not parts:
        raise ValueError("mixture=[]: expected a list of sources, each with a weight")
    for line in wrong_options(options, *(str(part.get("source")) for part in parts)).values():
        raise ValueError(line)
    built: dict[str, Corpus] = {}
    weights: dict[str, float] = {}
    for number, part in enumerate(parts):
        given = {**taken_by(str(part.get("source")), options), **part}
        weight, source = given.pop("weight", None), given.pop("source", None)
        name = str(given.pop("name", None) or source)
        if not isinstance(source, str) or not isinstance(weight, (int, float)) or not weight > 0:
            raise ValueError(f"mixture[{number}]={dict(part)}: expected a source and a weight above 0")
        if source == "mixture" or given.get("streaming"):
            raise ValueError(f"mixture[{number}]: a mixture takes no mixture and no stream; prepare that part first")
        if name in built:
            name = f"{name}-{number}"
        built[name] = build_corpus(source, tokenizer=given.pop("tokenizer", tokenizer), **{**shared, **given})
        weights[name] = float(weight)
    corpora = list(built.values())
    names = {(corpus.tokenizer.digest, corpus.tokenizer.eos_id): corpus.tokenizer.name for corpus in corpora}
    if len(names) > 1:
        raise ValueError(f"mixture: the parts have different tokenizers, {', '.join(names.values())}; expected one")
    train = MixedRows([cast(Rows, corpus.train) for corpus in corpora])
    order = MixtureOrder(tuple(map(len, train.parts)), tuple(weights.values()))
    words = f"{order.weights}/" + "/".join(corpus.fingerprint for corpus in corpora)
    return Corpus(
        source="mixture",
        tokenizer=corpora[0].tokenizer,
        train=train,
        validation=MixedRows([cast(Rows, corpus.validation) for corpus in corpora]),
        documents={split: sum(corpus.documents[split] for corpus in corpora) for split in SPLITS},
        num_bytes={split: sum(corpus.num_bytes.get(split, 0) for corpus in corpora) for split in SPLITS},
        fingerprint=fingerprint(corpora[0].tokenizer.digest, {"train": words, "validation": words}),
        skipped="; ".join(corpus.skipped for corpus in corpora if corpus.skipped),
        weights=weights,
    )


def _pack_sides(
    spec: SourceSpec,
    streams: Mapping[Split, tuple[TokenStream, npt.NDArray[np.int64]]],
    documents: Mapping[Split, int],
    context_length: int,
    packing: str,
    encoder: Tokenizer,
) -> dict[Split, PackedRows]:
    rows: dict[Split, PackedRows] = {}
    for split, (stream, borders) in streams.items():
        if not documents[split]:
            raise ValueError(
                f"{spec.rule} leaves no document for {split} out of the {sum(documents.values())} of "
                f"source={spec.where}; change it, or add documents"
            )
        tokens = len(stream) - 1
        if 0 < tokens < context_length:
            raise ValueError(
                f"context_length={context_length} is longer than the whole {split} side of source={spec.where}, "
                f"{tokens} tokens; use at most {tokens}, change {spec.rule}, or add documents"
            )
        rows[split] = pack(packing, stream, borders, context_length, encoder.pad_id)
    return rows


def _train_documents(read: Source, spec: SourceSpec) -> Iterator[Document]:
    return (document for document in read(spec) if document.split == "train")


def _look_up(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        names = sorted([*known, "prepared", "mixture", *TASKS])
        nearest = get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"{kind}={name!r} is not one of {', '.join(names)}; did you mean {nearest!r}?")
    return known[name]
