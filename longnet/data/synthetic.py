"""Tasks that need a long memory and no files: a sample is a function of (seed, index) alone.

A sample is a prompt that fills the length it is given and an answer that is only found far back in it. `passkey` hides
a number in filler, `needle` the number of a name, `multi_key` those of several names, `recall` asks for one of many
pairs, `lookup` for signs of many kinds, `copy` repeats a text, `multi_hop` follows a chain of assignments
scattered through filler, and `variable_tracking` asks for all names of such a chain.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from longnet.data.tokenizer import Tokenizer

FILLER = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back again. ")
# Hops of a chain, assignments beside the one that is asked for.
HOPS = 4
# Names with a number each, one of which is asked for.
KEYS = 8
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
# What asks, what is found (six signs of each kind), what lies between: a token each for any tokenizer of bytes or of
# pieces of them.
KINDS, NOTHING = "ABCDEFGHIJKLM", "."
SIGNS = string.ascii_lowercase + "NOPQRSTUVWXYZ" + string.digits + "!\"#$%&'()*+,-/:;<=>?@[]^_{|}~"
# Tokens by which the last question may come early: more than most dilation rates.
SPARE = 32


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer.

    Attributes:
        ids: Prompt and answer.
        answer_start: Where the answer begins; it ends with `ids`.
        answer: The answer as text.
        depth: Where in the prompt the needle lies, from 0 (the beginning) to 1.
        needle_start: The position of its first token in `ids`; 0 where a task has none.
        also: Positions of tokens in the prompt that can be known like the answer, from what stands before them.
        rivals: Wrong answers of the same kind, each a token; empty where those of other samples will do.
    """

    ids: npt.NDArray[Any]
    answer_start: int
    answer: str
    depth: float
    needle_start: int = 0
    also: tuple[int, ...] = ()
    rivals: tuple[int, ...] = ()

    @property
    def prompt(self) -> npt.NDArray[Any]:
        """The ids up to the answer."""
        return self.ids[: self.answer_start]


class _Writer:
    """Joins texts that are encoded one by one, so that every length is known exactly."""

    def __init__(self, tokenizer: Tokenizer, words: np.random.Philox, length: int, at: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.encode = tokenizer.encode
        self.length = length
        self.at = at
        self._words = words

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1. From raw words, which numpy promises to be the same in every version."""
        return int(self._words.random_raw()) % limit

    def draw(self, count: int) -> npt.NDArray[np.uint64]:
        """So many words of 64 bits."""
        return self._words.random_raw(count)

    def shuffled(self, count: int) -> npt.NDArray[Any]:
        """The numbers from 0 to count - 1 in any order."""
        return np.argsort(self.draw(count), kind="stable")

    def word(self) -> str:
        syllables = [CONSONANTS[self.below(len(CONSONANTS))] + VOWELS[self.below(len(VOWELS))] for _ in range(3)]
        return "".join(syllables)

    def number(self) -> str:
        return str(10_000 + self.below(90_000))

    def check_room(self, least: int) -> None:
        if self.length < least:
            raise ValueError(f"length={self.length} is too short for the task; expected at least {least} tokens")

    def scatter(
        self, head: str, needles: list[str], question: str, answer: str, depth: float | None, asked: int = 0
    ) -> Sample:
        """Filler with needles in it, in order: at random places, or the one that is asked for at a given depth."""
        fixed = [self.encode(text) for text in (head, *needles, question, answer)]
        self.check_room(sum(map(len, fixed)))
        room = self.length - sum(map(len, fixed))
        filler = [self.encode(sentence) for sentence in FILLER]
        sentences: list[npt.NDArray[Any]] = []
        if self.at is not None:
            # Token by token, so that a needle can begin at any of them.
            sentences = np.split(np.resize(np.concatenate(filler), room), range(1, room)) if room else []
        else:
            while (sentence := filler[len(sentences) % len(filler)]).size <= room:
                sentences.append(sentence)
                room -= sentence.size
        places = sorted(self.below(len(sentences) + 1) for _ in needles)
        if depth is not None or self.at is not None:
            here = round((depth or 0) * len(sentences)) if self.at is None else self._place(fixed, asked, room)
            before, after = places[:asked], places[asked + 1 :]
            places = [*(min(place, here) for place in before), here, *(max(place, here) for place in after)]
        parts = [fixed[0]]
        done = start = 0
        for number, (needle, place) in enumerate(zip(fixed[1:-2], places, strict=True)):
            parts += sentences[done:place]
            start = sum(map(len, parts)) if number == asked else start
            parts.append(needle)
            done = place
        parts += [*sentences[done:], fixed[-2], fixed[-1]]
        return _sample(parts, answer, places[asked] / max(len(sentences), 1), start)

    def _place(self, fixed: list[npt.NDArray[Any]], asked: int, room: int) -> int:
        """How many tokens of filler make the needle begin at position `at`."""
        assert self.at is not None
        first = sum(map(len, fixed[: asked + 1]))
        if not first <= self.at <= first + room:
            nearest = min(max(self.at, first), first + room)
            raise ValueError(f"at={self.at}: expected {first} to {first + room}; the nearest is {nearest}")
        return self.at - first


def passkey(writer: _Writer, depth: float | None = None) -> Sample:
    key = writer.number()
    return writer.scatter(
        "Somewhere in this text there is a pass key. Remember it.\n",
        [f"The pass key is {key}. Remember it. {key} is the pass key. "],
        "\nWhat is the pass key? The pass key is",
        f" {key}",
        depth,
    )


def recall(writer: _Writer, depth: float | None = None) -> Sample:
    head, question = writer.encode("Remember these pairs.\n"), writer.encode("What belongs to ")
    pairs: dict[str, tuple[Any, ...]] = {}
    used = len(head) + len(question)
    asking = 0
    while True:
        key, value = writer.word(), writer.number()
        pair, *asked = (writer.encode(text) for text in (f"{key}: {value}\n", f"{key}?", f" {value}"))
        # Any of the pairs may be asked for.
        asking = max(asking, sum(map(len, asked)))
        if not pairs:
            writer.check_room(used + len(pair) + asking)
        if used + len(pair) + asking > writer.length:
            break
        if key not in pairs:
            pairs[key] = (pair, *asked, value)
            used += len(pair)
    chosen = writer.below(len(pairs)) if depth is None else min(int(depth * len(pairs)), len(pairs) - 1)
    _, *asked, value = list(pairs.values())[chosen]
    parts = [head, *(pair for pair, *_ in pairs.values()), question, *asked]
    return _sample(parts, f" {value}", chosen / len(pairs), sum(map(len, parts[: chosen + 1])))


def lookup(writer: _Writer, depth: float | None = None) -> Sample:
    """One sign of each kind, at any distance before its kind asks for it.

    A kind is a letter, and which signs it has is always the same, so that a single look finds the one that is there:
    with the least to learn, it tells best what an attention block can reach.
    """
    kinds, signs, nothing = (_tokens(writer.tokenizer, text) for text in (KINDS, SIGNS, NOTHING))
    writer.check_room(4)
    # Signs and questions begin at any token, so that no dilation has more of them than another: all but the last
    # question lie in places of two tokens from an odd or an even one on, and that one up to so many before the end.
    offset = writer.at % 2 if writer.at is not None else writer.below(2) if writer.length > 4 else 0
    end = writer.length - (0 if writer.at is not None else writer.below(min(SPARE, max(writer.length // 4, 1))))
    places = (end - 2 - offset) // 2
    if writer.at is not None and not 0 <= writer.at <= offset + 2 * (places - 1):
        nearest = min(max(writer.at, 0), offset + 2 * (places - 1))
        raise ValueError(f"at={writer.at}: expected 0 to {offset + 2 * (places - 1)}; the nearest is {nearest}")
    first = (
        writer.at // 2 if writer.at is not None
        else writer.below(places) if depth is None
        else round(depth * (places - 1))
    )  # fmt: skip
    others = min(len(KINDS) - 1, (places - 1) // 2)
    free = writer.shuffled(places - 1)[: 2 * others]
    free += free >= first
    shown, asked = np.sort(free.reshape(-1, 2), axis=1).T
    chosen = writer.shuffled(len(KINDS))[: others + 1]
    own = len(SIGNS) // len(KINDS)
    found = own * chosen + (writer.draw(others + 1) % own).astype(np.int64)
    body = np.resize(nothing, (places, 2))
    body[[first, *shown], 0] = signs[found]
    body[asked] = np.stack([kinds[chosen], signs[found]], axis=1)[1:]
    head, tail = (np.resize(nothing, n) for n in (offset, end - 2 - offset - 2 * places))
    parts = [head, body.ravel(), tail, kinds[chosen[:1]], signs[found[:1]]]
    also = tuple(np.sort(offset + 2 * asked + 1).tolist())
    rivals = np.delete(signs[own * chosen[0] : own * (chosen[0] + 1)], found[0] % own)
    made = _sample(parts, SIGNS[found[0]], first / max(places - 1, 1), offset + 2 * first)
    return replace(made, also=also, rivals=tuple(rivals.tolist()))


@lru_cache(maxsize=16)
def _tokens(tokenizer: Tokenizer, text: str) -> npt.NDArray[Any]:
    """The token of each character of a text."""
    # Behind one for a space, in some tokenizers.
    tokens = np.array([tokenizer.encode(character)[-1] for character in text])
    if len(set(tokens.tolist())) < len(text):
        raise ValueError(f"data.tokenizer={tokenizer.name}: lookup needs a token for each of {text}; try data=recall")
    return tokens


def copy(writer: _Writer, depth: float | None = None) -> Sample:
    head, middle = writer.encode("Copy this text:\n"), writer.encode("\nCopy: ")
    room = (writer.length - len(head) - len(middle)) // 2
    words: list[str] = []
    body: list[npt.NDArray[Any]] = []
    while True:
        word = f"{writer.word()} "
        ids = writer.encode(word)
        if not body:
            writer.check_room(len(head) + len(middle) + 2 * len(ids))
        if len(ids) > room:
            break
        words.append(word)
        body.append(ids)
        room -= len(ids)
    return _sample([head, *body, middle, np.concatenate(body)], "".join(words), 0.0)


def needle(writer: _Writer, depth: float | None = None) -> Sample:
    return _keyed(writer, 1, depth)


def multi_key(writer: _Writer, depth: float | None = None) -> Sample:
    return _keyed(writer, KEYS, depth)


def _keyed(writer: _Writer, count: int, depth: float | None) -> Sample:
    names = list(dict.fromkeys(writer.word() for _ in range(2 * count)))[:count]
    numbers = [writer.number() for _ in names]
    asked = writer.below(len(names))
    return writer.scatter(
        "Names have numbers here. Remember them.\n",
        [f"The number of {name} is {number}. " for name, number in zip(names, numbers, strict=True)],
        f"\nWhat is the number of {names[asked]}? The number of {names[asked]} is",
        f" {numbers[asked]}",
        depth,
        asked,
    )


def multi_hop(writer: _Writer, depth: float | None = None) -> Sample:
    chain, value, needles = _chains(writer)
    return writer.scatter(
        "Names are given to numbers, and to names.\n",
        needles,
        f"\nWhich number is {chain[-1]}? It is",
        f" {value}",
        depth,
    )


def variable_tracking(writer: _Writer, depth: float | None = None) -> Sample:
    chain, value, needles = _chains(writer)
    return writer.scatter(
        "Names are given to numbers, and to names.\n",
        needles,
        f"\nWhich names are {value}, in their order? They are",
        "".join(f" {name}" for name in chain),
        depth,
    )


def _chains(writer: _Writer) -> tuple[list[str], str, list[str]]:
    """A chain of names, its number, and the sentences that tell it, mixed with those of another chain."""
    names = list(dict.fromkeys(writer.word() for _ in range(2 * HOPS + 4)))
    chain, other = names[:HOPS], names[HOPS : 2 * HOPS]
    values = writer.number(), writer.number()
    needles = []
    # Two chains side by side, so that the value is found only by following the names.
    for hop in range(HOPS):
        for words, value in ((chain, values[0]), (other, values[1])):
            needles.append(f"Let {words[hop]} be {value if hop == 0 else words[hop - 1]}. ")
    return chain, values[0], needles


TASKS: dict[str, Callable[[_Writer, float | None], Sample]] = {
    "passkey": passkey,
    "needle": needle,
    "multi_key": multi_key,
    "recall": recall,
    "lookup": lookup,
    "copy": copy,
    "multi_hop": multi_hop,
    "variable_tracking": variable_tracking,
}
# Whose needle can begin at any token.
PLACEABLE = ("passkey", "needle", "multi_key", "lookup", "multi_hop", "variable_tracking")


def build_sample(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    seed: int,
    index: int,
    depth: float | None = None,
    at: int | None = None,
) -> Sample:
    """Make one sample of a task.

    Args:
        task: A name in `TASKS`.
        tokenizer: Makes the ids.
        length: The most tokens that prompt and answer may have together; they come within one sentence of it.
        seed: With `index` it chooses everything else.
        index: The number of the sample.
        depth: Where the needle lies, from 0 to 1; drawn when None. `copy` has none.
        at: The token of `ids` at which the needle begins, in place of `depth`, for the tasks of `PLACEABLE`. The sample
            then has exactly `length` tokens.

    Raises:
        ValueError: If there is no such task, or the length cannot hold it, or the needle cannot lie there.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    if at is not None and task not in PLACEABLE:
        raise ValueError(f"at={at}: the needle of task={task!r} cannot be placed; expected one of {PLACEABLE}")
    words = np.random.SeedSequence(seed, spawn_key=(index, *task.encode()))
    return TASKS[task](_Writer(tokenizer, np.random.Philox(words), length, at), depth)


def _sample(parts: list[npt.NDArray[Any]], answer: str, depth: float, needle_start: int = 0) -> Sample:
    ids = np.concatenate(parts)
    return Sample(ids, len(ids) - len(parts[-1]), answer, depth, needle_start)
