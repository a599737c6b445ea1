"""Makes a tokenizer or a token store of any text, and shows what is in a store.

    python scripts/prepare_data.py tokenizer --source text --path books --vocab-size 8192 --output data/books-bpe
    python scripts/prepare_data.py tokenize --source text --path books --tokenizer data/books-bpe --output data/books
    python scripts/prepare_data.py inspect data/books
    python train.py data=prepared data.path=data/books

Whole corpora have names, which say what of them to read: `--corpus eltec-eng --path ELTeC-eng.zip`. data/README.md
tells where they come from. A run that was stopped goes on by the same command; a second run does nothing unless the
input, the tokenizer or an option has changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from longnet.data.documents import SPLITS, SourceSpec
from longnet.data.prepare import check_output, input_bytes, read_documents, tokenize
from longnet.data.sources import SOURCES

# What to read of a corpus that people know by name. Where it lies is --path, unless it has a name on the hub.
CORPORA: dict[str, dict[str, Any]] = {
    "eltec-eng": {"source": "text", "include": ("*ENG*.txt", "*level[01]/ENG*.xml"), "validation_every": 7},
    "linux-source": {"source": "text", "include": ("*.c", "*.h", "*.S", "*.rs"), "on_bad_input": "skip"},
    "python-source": {"source": "text", "include": ("*.py",), "on_bad_input": "skip"},
    "pg19": {"source": "hf", "path": "emozilla/pg19", "validation_split": "validation"},
}

console = Console(stderr=True)


def main() -> None:
    options = parse()
    try:
        options.command(options)
    except ValueError as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


def train_tokenizer(options: argparse.Namespace) -> None:
    from longnet.data.hf_tokenizer import train_bpe

    spec = build_spec(options)
    check_output(options.output)
    with progress("reading", input_bytes(spec)) as show:

        def contents() -> Iterator[bytes]:
            read = 0
            for document in read_documents(spec):
                if document.split == "train":
                    yield document.content
                read += len(document.content)
                show(read)
                if options.megabytes and read > options.megabytes * 10**6:
                    return

        trained = train_bpe(contents(), options.vocab_size)
    trained.save_pretrained(options.output)
    report_skipped(str(spec.skipped) if spec.skipped.count else "")
    console.print(f"{options.output}: {len(trained)} ids")
    console.print(f"next  python scripts/prepare_data.py tokenize ... --tokenizer {options.output}", soft_wrap=True)


def make_store(options: argparse.Namespace) -> None:
    spec = build_spec(options)
    with progress("tokenizing", input_bytes(spec)) as show:
        prepared = tokenize(
            spec, options.tokenizer, options.output, workers=options.workers, dtype=options.dtype, on_progress=show
        )
    report_skipped(prepared.skipped)
    if prepared.because:
        console.print(f"made again: {prepared.because}", highlight=False, soft_wrap=True)
    sides = prepared.manifest.sides
    for split in SPLITS:
        side = sides[split]
        console.print(
            f"{split:<10}  {side.documents:,} documents  {side.num_bytes / 1e6:,.1f} MB  {side.tokens - 1:,} tokens",
            highlight=False,
        )
    console.print(f"{options.output}: {prepared.how}", highlight=False)
    console.print(f"next  python train.py data=prepared data.path={options.output}", highlight=False, soft_wrap=True)


def inspect(options: argparse.Namespace) -> None:
    from longnet.data.inspection import describe, plot_lengths
    from longnet.data.store import TokenStore

    store = TokenStore(options.store)
    print(describe(store, options.long))
    picture = options.plot or Path(options.store) / "lengths.png"
    plot_lengths(store, picture, options.long)
    console.print(f"plotted in {picture}", highlight=False)


def build_spec(options: argparse.Namespace) -> SourceSpec:
    values = dict(CORPORA[options.corpus]) if options.corpus else {}
    names = (
        "source", "path", "include", "text_field", "subset", "revision", "split", "validation_split", "streaming",
        "validation_fraction", "validation_every", "on_bad_input",
    )  # fmt: skip
    for name in names:
        if (given := getattr(options, name)) is not None:
            values[name] = tuple(given) if name == "include" else given
    if "source" not in values:
        raise ValueError(f"--source is missing: expected one of {', '.join(SOURCES)}, or --corpus with a known name")
    return SourceSpec(**values)


def report_skipped(skipped: str) -> None:
    if skipped:
        console.print(skipped, style="yellow", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    source = argparse.ArgumentParser(add_help=False)
    add = source.add_argument
    add("--corpus", choices=CORPORA, help="a corpus by its name, which sets the options below; they can be changed")
    add("--source", choices=SOURCES, help="where documents come from")
    add("--path", help="a file, directory, glob, archive, or a dataset's name on the hub")
    add("--include", nargs="+", metavar="PATTERN", help="names of the files to read, such as '*.c'")
    add("--text-field", help="the field of a record that holds its text")
    add("--subset", help="configuration of a hub dataset")
    add("--revision", help="branch or commit of a hub dataset")
    add("--split", help="split of a hub dataset")
    add("--validation-split", help="split of a hub dataset that is all validation")
    add("--streaming", action="store_true", default=None, help="read a hub dataset without a copy on the disk")
    add("--validation-fraction", type=float, help="share of the documents kept for validation (0.05)")
    add("--validation-every", type=int, help="instead: documents whose number is divisible by this")
    add("--on-bad-input", choices=("fatal", "skip"), help="what to do with what cannot be read (fatal)")
    add("--output", required=True, type=Path, help="directory to make")

    command = commands.add_parser("tokenizer", parents=[source], help="train a byte-level BPE tokenizer")
    command.add_argument("--vocab-size", type=int, default=16384)
    command.add_argument("--megabytes", type=float, help="read no more than so much of the corpus")
    command.set_defaults(command=train_tokenizer)

    command = commands.add_parser("tokenize", parents=[source], help="make a token store")
    command.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer's directory")
    command.add_argument("--workers", type=int, help="processes; one a core by default")
    command.add_argument("--dtype", choices=("uint16", "uint32"), help="integers of the store; what fits by default")
    command.set_defaults(command=make_store)

    command = commands.add_parser("inspect", help="print and plot the lengths of a store's documents")
    command.add_argument("store", help="the store's directory")
    command.add_argument("--long", type=int, default=32768, help="tokens from which a document counts as long")
    command.add_argument("--plot", type=Path, help="where to put the picture; lengths.png in the store by default")
    command.set_defaults(command=inspect)
    return parser.parse_args()


if __name__ == "__main__":
    main()
