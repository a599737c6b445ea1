"""How fast data comes: the loader from a prepared store, and the making of the store against the bare tokenizer.

    python scripts/benchmark_data.py loader data/books            # tokens/s by packing and workers; arrow beside it
    python scripts/benchmark_data.py tokenize --path books.tar.xz --tokenizer data/books-bpe
    python scripts/benchmark_data.py memory --cap 200             # a document ten times larger than the memory

Ratios of figures from one run are what counts; absolute ones are this machine's.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from longnet.data.documents import SourceSpec

console = Console(highlight=False, soft_wrap=True)


def rate(work: Callable[[], float], repeats: int) -> float:
    """The median of amounts per second."""
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        amount = work()
        rates.append(amount / (time.perf_counter() - start))
    return median(rates)


def rate_of(batches: Iterator[Any], number: int) -> float:
    """Tokens per second, once the workers have started."""
    next(batches)
    return rate(lambda: sum(batch["input_ids"].numel() for batch in islice(batches, number)), 3)


def benchmark_loader(options: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader

    from longnet.data import StepBatchSampler, TokenStore, build_corpus
    from longnet.data.packing import collate

    context, batch = options.context_length, options.batch_size
    console.print(f"rows of {context:,} tokens, {batch} a batch, {os.cpu_count()} cores; tokens/s")
    for packing in ("concat", "isolate", "whole"):
        start = time.perf_counter()
        corpus = build_corpus("prepared", path=options.store, tokenizer=None, context_length=context, packing=packing)
        opened = time.perf_counter() - start
        for workers in (0, 1, 2):
            sampler = StepBatchSampler(len(corpus.train), batch, seed=1)  # type: ignore[arg-type]
            loader: Any = DataLoader(corpus.train, batch_sampler=sampler, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]
            found = rate_of(iter(loader), options.batches)
            console.print(f"{packing:<8} {workers} workers  {found:>15,.0f}   (opened in {opened:.2f} s)")
    stream = TokenStore(options.store).stream("train")
    compare_formats(stream[: min(len(stream), 2**26)], context, options.batches * batch)


def compare_formats(tokens: np.ndarray[Any, Any], context: int, reads: int) -> None:
    """The same rows, at random, from a plain file and from arrow through `datasets`."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()

    with tempfile.TemporaryDirectory() as folder:
        rows = len(tokens) // context
        whole = np.asarray(tokens[: rows * context])
        start = time.perf_counter()
        whole.tofile(f"{folder}/tokens")
        written = {"plain file": time.perf_counter() - start}
        start = time.perf_counter()
        kind = Features({"ids": List(Value(whole.dtype.name))})
        Dataset.from_generator(
            lambda: ({"ids": row} for row in whole.reshape(rows, context)), features=kind, cache_dir=folder
        ).save_to_disk(f"{folder}/arrow")
        written["arrow"] = time.perf_counter() - start
        mapped = np.memmap(f"{folder}/tokens", dtype=whole.dtype, mode="r")
        dataset = Dataset.load_from_disk(f"{folder}/arrow").with_format("numpy")
        places = np.random.default_rng(0).integers(0, rows, reads).tolist()
        readers: dict[str, Callable[[int], Any]] = {
            "plain file": lambda row: mapped[row * context : (row + 1) * context].astype(np.int64),
            "arrow": lambda row: dataset[row]["ids"].astype(np.int64),
        }
        for name, read in readers.items():
            assert np.array_equal(read(3), whole[3 * context : 4 * context])
            found = rate(lambda: sum(len(read(place)) for place in places), 3)  # noqa: B023
            speed = whole.nbytes / 1e6 / written[name]
            console.print(f"{name:<11} written at {speed:,.0f} MB/s, rows read at random {found:>15,.0f} tokens/s")


def benchmark_tokenize(options: argparse.Namespace) -> None:
    from longnet.data import load_tokenizer, tokenize
    from longnet.data.prepare import read_documents

    spec = SourceSpec("text", options.path, validation_every=7)
    texts = [document.content.decode() for document in read_documents(spec)]
    size = sum(len(text.encode()) for text in texts)
    cores = os.cpu_count() or 1
    made: list[float] = []
    bare: list[float] = []
    backend = None
    if options.tokenizer != "bytes":
        import tokenizers

        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        backend = tokenizers.Tokenizer.from_file(f"{options.tokenizer}/tokenizer.json")
    else:
        encoder = load_tokenizer("bytes")
    with tempfile.TemporaryDirectory() as folder:
        # In turn, so that what else the machine does falls on both.
        for number in range(options.repeats):
            start = time.perf_counter()
            if backend is not None:
                for at in range(0, len(texts), 8):
                    backend.encode_batch_fast(texts[at : at + 8], add_special_tokens=False)
            else:
                for text in texts:
                    encoder.encode(text)
            bare.append(size / 1e6 / (time.perf_counter() - start))
            start = time.perf_counter()
            tokenize(spec, options.tokenizer, f"{folder}/{number}", workers=cores)
            made.append(size / 1e6 / (time.perf_counter() - start))
    ratios = [ours / theirs for ours, theirs in zip(made, bare, strict=True)]
    console.print(
        f"{size / 1e6:.0f} MB on {cores} cores: the bare tokenizer {median(bare):.2f} MB/s, the store "
        f"{median(made):.2f} MB/s, ratio {median(ratios):.2f}"
    )


def benchmark_memory(options: argparse.Namespace) -> None:
    cap, megabytes = options.cap * 2**20, options.cap * 2**20 * 10 // 10**6
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        texts = Path(folder, "texts")
        texts.mkdir()
        (texts / "0.txt").write_text("held out")
        line = b"A long document goes on and on, line after line, and nobody knows where it ends.\n"
        with (texts / "1.txt").open("wb") as file:
            for _ in range(megabytes):
                file.write(line * (10**6 // len(line)))
        script = Path(__file__).with_name("prepare_data.py")
        command = [sys.executable, script, "tokenize", "--source", "text", "--path", texts, "--validation-every", 7]
        command += ["--tokenizer", options.tokenizer, "--output", Path(folder, "store"), "--workers", options.workers]
        start = time.perf_counter()
        subprocess.run(
            list(map(str, command)),
            check=True,
            stderr=subprocess.DEVNULL,
            # Threads of a library that is not used here would take their share of the cap.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (cap, cap)),
        )
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    console.print(
        f"one document of {megabytes} MB, each process under {options.cap} MiB: {seconds:.0f} s, peak {peak:.0f} MiB"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    command = commands.add_parser("loader", help="rows from a store")
    command.add_argument("store")
    command.add_argument("--context-length", type=int, default=32768)
    command.add_argument("--batch-size", type=int, default=4)
    command.add_argument("--batches", type=int, default=100, help="batches in a measurement")
    command.set_defaults(command=benchmark_loader)
    command = commands.add_parser("tokenize", help="the making of a store")
    command.add_argument("--path", required=True, help="text files, as prepare_data.py takes them")
    command.add_argument("--tokenizer", default="bytes")
    command.add_argument("--repeats", type=int, default=3)
    command.set_defaults(command=benchmark_tokenize)
    command = commands.add_parser("memory", help="the memory that the making of a store takes")
    command.add_argument("--cap", type=int, default=200, help="MiB a process may allocate; the input is ten times it")
    command.add_argument("--tokenizer", default="bytes")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--folder", help="where to put the made-up input")
    command.set_defaults(command=benchmark_memory)
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.command(options)


if __name__ == "__main__":
    main()
