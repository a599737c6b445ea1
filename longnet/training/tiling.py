"""Layers worked through in tiles of the sequence, so that only what attention needs is ever held at full length.

Forward computes a layer's queries, keys and values tile by tile, attends at full length, and computes the rest of the
layer tile by tile. Backward computes each tile again before it goes through it: nothing of the MLP's width, and no
normed, projected or activated copy of the hidden states, exists for more than one tile. Gradients of the weights are
summed over the tiles in float32.

B batch, N positions, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longnet.model.layers import LongNetDecoderLayer
from longnet.model.rope import Rotation

from .offload import HostStore

# What of a layer waits for backward beside its input: queries, keys, values and the attention's output; the output
# alone; nothing.
Keep = Literal["attention", "output", "input"]


@dataclass(frozen=True)
class LayerTiles:
    """Runs a decoder layer in tiles.

    Attributes:
        size: positions of a tile; None for one tile.
        keep: what backward does not compute again.
        store: where the layer's input waits for backward; None for the device.
        compiled: whether torch.compile makes the code of a tile. Dropout would not be the same again in backward, so
            layers that use it stay uncompiled.
    """

    size: int | None
    keep: Keep = "input"
    store: HostStore | None = None
    compiled: bool = False

    def __call__(
        self, layer: LongNetDecoderLayer, hidden: Tensor, rotation: Rotation | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        run = _LayerRun(self, layer, rotation, cu_seqlens, torch.is_grad_enabled(), hidden.device)
        out: Tensor = _TiledLayer.apply(run, hidden, *_trained(layer))
        return out


@dataclass(frozen=True)
class PositionTiles:
    """Applies a module that works on each position alone, such as a norm or an embedding, in tiles of ``size``."""

    size: int

    def __call__(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        out: Tensor = _TiledModule.apply(self.size, module, dtype, x, *_trained(module))
        return out


class _TiledModule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, size: int, module: nn.Module, dtype: torch.dtype | None, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size, ctx.module, ctx.dtype, ctx.replay = size, module, dtype, _Replay(x.device)
        out = _Whole(x.shape[1])
        for part in _parts(x.shape[1], size):
            out.write(part, _cast(module(x[:, part]), dtype))
        return out.tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        sums, dx = _Sums(_trained(ctx.module)), _Whole(x.shape[1])
        for part in _parts(x.shape[1], ctx.size):
            # Token ids have no gradient.
            leaves = _leaves(x[:, part]) if x.is_floating_point() else []
            with ctx.replay.forward():
                out = _cast(ctx.module(*(leaves or [x[:, part]])), ctx.dtype)
            for tile in sums.backward([out], [grad[:, part]], leaves):
                dx.write(part, tile)
        return None, None, None, dx.tensor if x.is_floating_point() else None, *sums.result()


class _TiledLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _LayerRun, hidden: Tensor, *weights: Tensor) -> Tensor:
        if run.trains:
            ctx.run = run
            # First of all, so that the copy has the whole layer's time.
            ctx.kept = None if run.tiles.store is None else run.tiles.store.put(hidden)
            ctx.save_for_backward(*([hidden] if ctx.kept is None else []))
        return run.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _LayerRun = ctx.run
        hidden = ctx.saved_tensors[0] if run.tiles.store is None else run.tiles.store.get(ctx.kept)
        with run.replay.random():
            return None, *run.backward(hidden, grad)


class _LayerRun:
    """One pass through a layer, and what backward needs of it beside the layer's input."""

    def __init__(
        self,
        tiles: LayerTiles,
        layer: LongNetDecoderLayer,
        rotation: Rotation | None,
        cu_seqlens: Tensor | None,
        trains: bool,
        device: torch.device,
    ) -> None:
        self.tiles = tiles
        self.layer = layer
        self.rotation = rotation
        self.cu_seqlens = cu_seqlens
        self.trains = trains
        self.replay = _Replay(device)
        self.attention: _Attention | None = None
        draws = layer.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in layer.modules())
        compiled = tiles.compiled and not draws
        self.before_attention, self.after_attention = _tile_code(compiled)

    def forward(self, hidden: Tensor) -> Tensor:
        keep = self.tiles.keep if self.trains else "input"
        self.replay.mark("attention")
        with torch.set_grad_enabled(keep != "input"):
            attention = self.attend(hidden)
        attended = attention.out.detach()
        if keep == "output":
            attention.drop_inputs()
        if keep != "input":
            self.attention = attention
        del attention
        self.replay.mark("after")
        out = _Whole(hidden.shape[1])
        for part in self.parts(hidden):
            out.write(part, self.after_attention(self.layer, hidden[:, part], attended[:, part]))
        return out.tensor

    def backward(self, hidden: Tensor, grad: Tensor) -> Iterator[Tensor | None]:
        sums = _Sums(_trained(self.layer))
        attention, self.attention = self.attention, None
        if attention is None:
            self.replay.rewind("attention")
            with self.replay.forward():
                attention = self.attend(hidden)
        elif self.tiles.keep == "output":
            self.replay.rewind("attention")
            with self.replay.forward():
                self.project(hidden, attention.restored_inputs())

        self.replay.rewind("after")
        d_hidden, d_attended = _Whole(hidden.shape[1]), _Whole(hidden.shape[1])
        for part in self.parts(hidden):
            leaves = _leaves(hidden[:, part], attention.out[:, part])
            with self.replay.forward():
                out = self.after_attention(self.layer, *leaves)
            tiles = sums.backward([out], [grad[:, part]], leaves)
            d_hidden.write(part, tiles[0])
            d_attended.write(part, tiles[1])
        del leaves, out, tiles

        d_qkv = torch.autograd.grad(attention.out, attention.inputs, d_attended.tensor)
        del attention, d_attended
        # Adapters have dropout in the projections.
        self.replay.rewind("attention")
        for part in self.parts(hidden):
            leaves = _leaves(hidden[:, part])
            with self.replay.forward():
                outs = self.before_attention(self.layer, leaves[0], self.rotation_of(part))
            (tile,) = sums.backward(outs, [whole[:, part] for whole in d_qkv], leaves)
            d_hidden.tensor[:, part] += tile
        return iter((d_hidden.tensor, *sums.result()))

    def attend(self, hidden: Tensor) -> _Attention:
        with torch.no_grad():
            q, k, v = _leaves(*self.project(hidden))
        return _Attention([q, k, v], self.layer.attend(q, k, v, self.cu_seqlens))

    def project(self, hidden: Tensor, into: Sequence[Tensor | None] = (None, None, None)) -> list[Tensor]:
        """Queries, keys and values at full length, from tiles."""
        wholes = [_Whole(hidden.shape[1], target) for target in into]
        with torch.no_grad():
            for part in self.parts(hidden):
                tiles = self.before_attention(self.layer, hidden[:, part], self.rotation_of(part))
                for whole, tile in zip(wholes, tiles, strict=True):
                    whole.write(part, tile)
        return [whole.tensor for whole in wholes]

    def parts(self, hidden: Tensor) -> list[slice]:
        return _parts(hidden.shape[1], self.tiles.size)

    def rotation_of(self, part: slice) -> Rotation | None:
        return None if self.rotation is None else Rotation(*(table[:, part] for table in self.rotation))


class _Attention:
    """Queries, keys and values (B, N, H, D), and the attention's output with its graph down to these."""

    def __init__(self, inputs: list[Tensor], out: Tensor) -> None:
        self.inputs = inputs
        self.out = out
        self._bytes = [x.untyped_storage().nbytes() for x in inputs]

    def drop_inputs(self) -> None:
        # The graph goes on holding these tensors: only their memory can be given up.
        for x in self.inputs:
            x.untyped_storage().resize_(0)

    def restored_inputs(self) -> list[Tensor]:
        """The same tensors with their memory back, to be written again, past autograd's count of changes."""
        for x, size in zip(self.inputs, self._bytes, strict=True):
            x.untyped_storage().resize_(size)
        return [x.data for x in self.inputs]


class _Whole:
    """A tensor at full length, made of tiles; a single tile is not copied."""

    def __init__(self, seq_len: int, target: Tensor | None = None) -> None:
        self._seq_len = seq_len
        self._target = target

    @property
    def tensor(self) -> Tensor:
        assert self._target is not None
        return self._target

    def write(self, part: slice, tile: Tensor) -> None:
        if self._target is None and tile.shape[1] == self._seq_len:
            self._target = tile
            return
        if self._target is None:
            self._target = tile.new_empty(tile.shape[0], self._seq_len, *tile.shape[2:])
        self._target[:, part] = tile


class _Sums:
    """The weights' gradients, added up over tiles in float32 at least."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self._weights = weights
        self._totals: list[Tensor | None] = [None] * len(weights)

    def backward(self, outs: Sequence[Tensor], grads: Sequence[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Goes back through a tile: adds to the sums, and gives the gradients of ``leaves``."""
        found = torch.autograd.grad(outs, (*leaves, *self._weights), grads, allow_unused=True)
        for index, grad in enumerate(found[len(leaves) :]):
            if grad is not None:
                total = self._totals[index]
                if total is None:
                    exact = torch.promote_types(self._weights[index].dtype, torch.float32)
                    total = self._totals[index] = torch.zeros_like(self._weights[index], dtype=exact)
                total += grad
        return found[: len(leaves)]

    def result(self) -> list[Tensor | None]:
        totals = zip(self._weights, self._totals, strict=True)
        return [None if total is None else total.to(weight.dtype) for weight, total in totals]


class _Replay:
    """Autocast and random numbers as they were in forward, for computing a part of it again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, list[Tensor]] = {}
        self._autocasts = device.type != "meta" and torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type) if self._autocasts else None

    def mark(self, name: str) -> None:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        self._marks[name] = states

    def rewind(self, name: str) -> None:
        cpu, *device = self._marks[name]
        torch.set_rng_state(cpu)
        for state in device:
            torch.cuda.set_rng_state(state, self._device)

    def random(self) -> AbstractContextManager[None]:
        """Leaves the random state as it was found."""
        return torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else [])

    @contextmanager
    def forward(self) -> Iterator[None]:
        # Only what is computed again belongs inside: backward takes its dtypes from there, not from autocast.
        with torch.enable_grad():
            if not self._autocasts:
                yield
                return
            with torch.autocast(self._device.type, dtype=self._dtype):
                yield


@cache
def _tile_code(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    before, after = LongNetDecoderLayer.before_attention, LongNetDecoderLayer.after_attention
    if not compiled:
        return before, after
    # All layers share the code of a tile. There are two lengths of tiles, the last one's and the others'.
    return torch.compile(before, dynamic=False), torch.compile(after, dynamic=False)


def _trained(module: nn.Module) -> tuple[Tensor, ...]:
    return tuple(weight for weight in module.parameters() if weight.requires_grad)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _parts(seq_len: int, size: int | None) -> list[slice]:
    return [slice(begin, begin + (size or seq_len)) for begin in range(0, seq_len, size or seq_len)]
