"""An evaluation as a whole: what `scripts/evaluate.py` runs after training, and a callback while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from longnet.config.schema import MeasurementConfig
from longnet.data import Tokenizer, build_sample
from longnet.data.packing import TokenStream
from longnet.data.synthetic import PLACEABLE
from longnet.model import LongNetForCausalLM

from .language import Blocks, Tokens, choose_blocks, loss_by_context, loss_by_position
from .results import Results
from .retrieval import awkward_places, placement_sweep, retrieval_grid
from .text import Text

# Windows and prompts, from the trained context down by quarters; shorter ones than this tell little.
SHORTEST = 256
# Tokens that are looked through at a time.
SCANNED = 2**24


@dataclass(frozen=True)
class Evaluation:
    """Measures a model by options that are complete: `plan` makes one from a config."""

    model: LongNetForCausalLM
    text: Text
    documents: list[tuple[int, int]]
    options: MeasurementConfig
    contexts: list[int]
    blocks: Blocks
    lengths: dict[str, list[int]]
    trained: int

    @property
    def tokens(self) -> int:
        """How many tokens will be read, for a progress bar."""
        options, total = self.options, sum(end - start for start, end in self.documents)
        windows = {min(c, self.trained) if options.beyond == "slide" else c for c in self.contexts}
        total += len(self.blocks.ends) * sum(windows)
        for task, lengths in self.lengths.items():
            total += sum(lengths) * options.samples * (1 if task == "copy" else len(options.depths))
        if options.placements:
            total += len(awkward_places(self.model.config, self.trained)) * options.samples * self.trained
        return total

    def run(self, advance: Callable[[int], None] = lambda tokens: None) -> Results:
        """Measures everything; ``advance`` is told of the tokens that were read. The model must be in eval mode."""
        model, options = self.model, self.options
        shared: dict[str, Any] = {"batch_tokens": options.batch_tokens, "advance": advance}
        contexts = loss_by_context(
            model, self.text.stream, self.contexts, self.text.tokenizer, blocks=self.blocks,
            trained=self.trained if options.beyond == "slide" else None, **shared,
        ) if self.contexts else []  # fmt: skip
        positions = loss_by_position(model, self._documents(), **shared) if self.documents else []
        retrieval = [
            row
            for task, lengths in self.lengths.items()
            for row in retrieval_grid(
                model, self.text.tokenizer, [task], lengths, options.depths, samples=options.samples, **shared
            )
        ]
        placed = next((task for task in self.lengths if task in PLACEABLE), "needle")
        placements = (
            placement_sweep(model, self.text.tokenizer, self.trained, task=placed, samples=options.samples, **shared)
            if options.placements
            else []
        )
        facts = {"trained_context": self.trained, "source": self.text.source, "options": asdict(options)}
        return Results(facts, contexts, positions, retrieval, placements)

    def _documents(self) -> Iterator[Tokens]:
        return (self.text.stream[start : end + 1] for start, end in self.documents)


def plan(model: LongNetForCausalLM, text: Text, options: MeasurementConfig) -> Evaluation:
    """Chooses what the options leave open, and sees that there is text enough for what they ask.

    Raises:
        ValueError: if a window is longer than the text, or a prompt too short for its task.
    """
    trained = model.config.max_position_embeddings
    stream = text.stream
    contexts = _quarters(trained, len(stream) - 1) if options.contexts is None else sorted(set(options.contexts))
    if len(stream) == 0:
        # A made-up task, or a mixture, is no running text.
        contexts = []
    looked_for = len(stream) and (options.documents or options.within_documents)
    borders = _documents(stream, text.tokenizer.eos_id) if looked_for else []
    stretches = borders if options.within_documents else [(0, len(stream) - 1)]
    slides = trained if options.beyond == "slide" else None
    blocks = choose_blocks(stretches, contexts, options.max_tokens, slides) if contexts else Blocks((), 0)
    most = options.document_tokens or len(stream)
    documents = [(start, min(end, start + most)) for start, end in _spread(borders, options.documents)]
    lengths = {task: _lengths(task, text.tokenizer, options, trained) for task in options.tasks}
    return Evaluation(model, text, documents, options, contexts, blocks, lengths, trained)


def _quarters(longest: int, available: int) -> list[int]:
    lengths = []
    length = min(longest, available)
    while length >= min(SHORTEST, longest) and length >= 2:
        lengths.append(length)
        length //= 4
    return sorted(lengths)


def _lengths(task: str, tokenizer: Tokenizer, options: MeasurementConfig, trained: int) -> list[int]:
    def fits(length: int) -> bool:
        try:
            build_sample(task, tokenizer, length - 1, seed=0, index=0)
        except ValueError:
            return False
        return True

    if options.lengths is not None:
        for length in options.lengths:
            build_sample(task, tokenizer, length - 1, seed=0, index=0)
        return sorted(set(options.lengths))
    return [length for length in _quarters(trained, trained) if fits(length)]


def _documents(stream: TokenStream, eos_id: int) -> list[tuple[int, int]]:
    """Begin (at the eos before it) and end (the eos behind it) of every document."""
    # A part at a time: the stream may be a file that is larger than memory.
    parts = range(0, len(stream), SCANNED)
    borders = np.concatenate([np.flatnonzero(stream[begin : begin + SCANNED] == eos_id) + begin for begin in parts])
    return list(pairwise(borders.tolist())) or [(0, len(stream) - 1)]


def _spread(documents: list[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    if not documents or number == 0:
        return []
    chosen = np.unique(np.linspace(0, len(documents) - 1, min(number, len(documents))).round().astype(int))
    return [documents[index] for index in chosen]
