"""What sees what: the pattern of dilated attention.

A pattern is a list of levels (segment length w, dilation rate r). With n' = n + shift, position n is a *row* of a
level for a head of phase p iff ``(n' mod w) mod r == p``; a query sees the keys that are rows of the same segment.
Everything else in this package is derived from that sentence.

No tensor library is imported here until a tensor is asked for, so that configs can be checked at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

HEADS = ("all", "grouped")

# Larger than any sequence, and its products with the other sizes still fit into 64 bits.
UNBOUNDED = 2**40


class Level(NamedTuple):
    segment_length: int
    dilation_rate: int


class SegmentRun(NamedTuple):
    """``number`` neighbouring segments of ``length`` positions each, the first beginning at ``start``.

    ``offset`` is where in its segment the first position lies: not 0 only where a shift cut the first segment.
    """

    start: int
    number: int
    length: int
    offset: int


@dataclass(frozen=True)
class DilationPattern:
    """The levels of dilated attention and how the heads share them.

    Levels are kept sorted by segment length, so patterns that mean the same compare and hash equal.

    Args:
        segment_lengths: w of each level; a segment may be longer than the sequence.
        dilation_rates: r of each level, 1 <= r <= w; r need not divide w, the number of heads or the sequence.
        heads: "all" gives every head every level, with phase ``head mod r`` (the paper). "grouped" splits the heads
            in contiguous groups, one level each, with phase ``group mod r`` (cheaper).
        shift: n + shift stands for n, which moves the segment borders.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    heads: str = "all"
    shift: int = 0

    def __post_init__(self) -> None:
        lengths = _integers("segment_lengths", self.segment_lengths)
        rates = _integers("dilation_rates", self.dilation_rates)
        if len(lengths) != len(rates):
            shorter = min(len(lengths), len(rates))
            raise ValueError(
                f"segment_lengths={lengths} has {len(lengths)} levels but dilation_rates={rates} has {len(rates)}; "
                f"give one rate per segment length, for example the first {shorter} of each"
            )
        for level, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
            if rate > length:
                raise ValueError(
                    f"dilation_rates[{level}]={rate} is larger than segment_lengths[{level}]={length}: "
                    f"expected r <= w; the nearest rate that works is {length}"
                )
        if self.heads not in HEADS:
            nearest = "grouped" if str(self.heads).lower().startswith("g") else "all"
            raise ValueError(f"heads={self.heads!r}: expected one of {HEADS}; did you mean {nearest!r}?")
        (shift,) = _integers("shift", (self.shift,), least=0)
        levels = sorted(zip(lengths, rates, strict=True))
        object.__setattr__(self, "segment_lengths", tuple(w for w, _ in levels))
        object.__setattr__(self, "dilation_rates", tuple(r for _, r in levels))
        object.__setattr__(self, "shift", shift)

    @classmethod
    def geometric(cls, context: int, base: int = 2048, ratio: int = 2, **options: Any) -> DilationPattern:
        """The paper's kind of pattern: w and r both grow by ``ratio`` until one segment holds the context."""
        (context,) = _integers("context", (context,))
        (base,) = _integers("base", (base,))
        (ratio,) = _integers("ratio", (ratio,), least=2)
        lengths, rates = [base], [1]
        while lengths[-1] < context:
            lengths.append(lengths[-1] * ratio)
            rates.append(rates[-1] * ratio)
        return cls(tuple(lengths), tuple(rates), **options)

    @classmethod
    def dense(cls) -> DilationPattern:
        """Ordinary attention: one segment that holds any sequence."""
        return cls((UNBOUNDED,), (1,))

    @classmethod
    def from_config(cls, config: str | Mapping[str, Any] | DilationPattern) -> DilationPattern:
        """A pattern from a name of ``NAMED_PATTERNS`` or from a mapping of the constructor's arguments."""
        if isinstance(config, DilationPattern):
            return config
        if isinstance(config, str):
            if config not in NAMED_PATTERNS:
                raise ValueError(f"pattern={config!r}: expected one of {sorted(NAMED_PATTERNS)} or a mapping")
            return NAMED_PATTERNS[config]
        known = set(cls.__dataclass_fields__)
        if unknown := set(config) - known:
            raise ValueError(f"pattern has unknown keys {sorted(unknown)}: expected some of {sorted(known)}")
        if missing := {"segment_lengths", "dilation_rates"} - set(config):
            raise ValueError(f"pattern={dict(config)} lacks {sorted(missing)}")
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """The mapping that ``from_config`` takes, ready for JSON."""
        config = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}

    def __str__(self) -> str:
        levels = ", ".join(f"{'all' if w == UNBOUNDED else w}/{r}" for w, r in self.levels)
        shift = f", shift {self.shift}" if self.shift else ""
        return f"w/r {levels} ({self.heads} heads{shift})"

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(map(Level, self.segment_lengths, self.dilation_rates))

    @property
    def reach(self) -> int:
        """The longest distance, in positions, within which two tokens can share a segment."""
        return max(self.segment_lengths)

    def head_groups(self, level: int, num_heads: int) -> Iterator[tuple[int, range]]:
        """The heads of a level that share a phase, as (phase, heads)."""
        rate = self.dilation_rates[level]
        if self.heads == "all":
            for phase in range(min(rate, num_heads)):
                yield phase, range(phase, num_heads, rate)
            return
        size, larger = divmod(num_heads, len(self.levels))
        first = level * size + min(level, larger)
        group = range(first, first + size + (level < larger))
        if group:
            yield level % rate, group

    def phase(self, level: int, head: int, num_heads: int) -> int | None:
        """The phase of a head at a level; None where the head does not use the level."""
        if not 0 <= head < num_heads:
            raise ValueError(f"head={head}: expected 0 <= head < num_heads={num_heads}")
        return next((phase for phase, heads in self.head_groups(level, num_heads) if head in heads), None)

    def segments(self, level: int, seq_len: int) -> Iterator[SegmentRun]:
        """The segments of a level over ``seq_len`` positions: one cut by the shift, whole ones, a last short one."""
        length = self.segment_lengths[level]
        offset = self.shift % length
        start = 0
        if offset:
            start = min(seq_len, length - offset)
            yield SegmentRun(0, 1, start, offset)
        whole, rest = divmod(seq_len - start, length)
        if whole:
            yield SegmentRun(start, whole, length, 0)
        if rest:
            yield SegmentRun(start + whole * length, 1, rest, 0)

    def first_row(self, level: int, phase: int, run: SegmentRun) -> int:
        """Where the rows of a phase begin in each segment of a run; they follow every r positions."""
        return (phase - run.offset) % self.dilation_rates[level]

    def edges(self, seq_len: int, num_heads: int, causal: bool = True) -> int:
        """How many (query, key) pairs all heads and levels hold together."""
        return sum(self.level_edges(level, seq_len, num_heads, causal) for level in range(len(self.levels)))

    def level_edges(self, level: int, seq_len: int, num_heads: int, causal: bool = True) -> int:
        """How many (query, key) pairs all heads hold at one level."""
        total = 0
        for run in self.segments(level, seq_len):
            for phase, heads in self.head_groups(level, num_heads):
                rows = len(range(self.first_row(level, phase, run), run.length, self.dilation_rates[level]))
                pairs = rows * (rows + 1) // 2 if causal else rows * rows
                total += pairs * run.number * len(heads)
        return total

    def flops(self, seq_len: int, num_heads: int, head_dim: int, causal: bool = True) -> int:
        """Floating-point operations of the two matrix products, forward; backward takes 2.5 times as many."""
        return 4 * head_dim * self.edges(seq_len, num_heads, causal)

    def max_keys(self, seq_len: int | None = None) -> int:
        """The most keys that a query can see, counted with their multiplicity; also the bound of a key cache."""
        keys = [-(-(w if seq_len is None else min(w, seq_len)) // r) for w, r in self.levels]
        return sum(keys) if self.heads == "all" else max(keys)

    def rows(self, level: int, head: int, seq_len: int, num_heads: int) -> Tensor:
        """The positions that are rows of a level for a head, ascending."""
        import torch

        phase = self.phase(level, head, num_heads)
        if phase is None:
            return torch.empty(0, dtype=torch.long)
        within = (torch.arange(seq_len) + self.shift) % self.segment_lengths[level]
        return (within % self.dilation_rates[level] == phase).nonzero().flatten()

    def counts(self, seq_len: int, head: int, num_heads: int, causal: bool = True, device: Any = None) -> Tensor:
        """How often query n sees key m, as an (N, N) int64 matrix: the definition, written down literally."""
        import torch

        n = torch.arange(seq_len, device=device) + self.shift
        counts = torch.zeros(seq_len, seq_len, dtype=torch.long, device=device)
        for level, (length, rate) in enumerate(self.levels):
            phase = self.phase(level, head, num_heads)
            if phase is None:
                continue
            row = (n % length) % rate == phase
            segment = n // length
            counts += (segment[:, None] == segment[None, :]) & row[:, None] & row[None, :]
        return counts.tril() if causal else counts

    def uncovered(self, seq_len: int, head: int, num_heads: int) -> int:
        """How many positions no level covers for a head: their output is 0."""
        import torch

        covered = torch.zeros(seq_len, dtype=torch.bool)
        for level in range(len(self.levels)):
            covered[self.rows(level, head, seq_len, num_heads)] = True
        return seq_len - int(covered.sum())


def _integers(name: str, values: Any, least: int = 1) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r}: expected a list of integers, for example [2048, 4096]")
    integers = []
    for value in values:
        try:
            if isinstance(value, bool):
                raise TypeError
            integers.append(operator.index(value))
        except TypeError:
            nearest = f"; the nearest is {round(value)}" if isinstance(value, float) and value == value else ""
            raise ValueError(f"{name} has {value!r}: expected an integer{nearest}") from None
        if integers[-1] < least:
            raise ValueError(f"{name} has {value}: expected an integer >= {least}; the nearest is {least}")
    if not integers:
        raise ValueError(f"{name} is empty: expected at least one level, for example [2048]")
    return tuple(integers)


NAMED_PATTERNS: dict[str, DilationPattern] = {
    "paper": DilationPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
    "dense": DilationPattern.dense(),
}
