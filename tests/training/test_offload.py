from __future__ import annotations

import gc

import torch

from longnet.training.offload import HostStore, Kept


def numbered(count: int, size: int = 1000) -> list[torch.Tensor]:
    return [torch.full((2, size), float(number)) for number in range(count)]


def put_all(store: HostStore, tensors: list[torch.Tensor]) -> list[Kept]:
    return [store.put(tensor) for tensor in tensors]


def test_tensors_come_back_as_they_were() -> None:
    store = HostStore(block_bytes=1024)
    tensors = [
        torch.randn(3, 500),
        torch.randn(7, 11, dtype=torch.bfloat16),
        torch.randn(20, 20).T,
        torch.randn(256),
        torch.randn(5, dtype=torch.float64)[None],
    ]
    kept = [store.put(tensor.clone()) for tensor in tensors]
    for tensor, place in zip(reversed(tensors), reversed(kept), strict=True):
        back = store.get(place)
        assert torch.equal(back, tensor)
        assert back.dtype == tensor.dtype


def test_the_device_holds_the_newest_alone() -> None:
    store = HostStore(block_bytes=1024)
    kept = put_all(store, numbered(4))
    assert [place.tensor is not None for place in kept] == [False, False, False, True]


def test_the_next_one_is_on_its_way() -> None:
    store = HostStore(block_bytes=1024)
    kept = put_all(store, numbered(4))
    for number in reversed(range(4)):
        assert store.get(kept[number])[0, 0] == number
        waiting = [place.tensor is not None for place in kept]
        assert waiting == [other == number - 1 for other in range(4)]


def test_any_order_gives_the_right_tensors() -> None:
    store = HostStore(block_bytes=1024)
    kept = put_all(store, numbered(5))
    for number in (1, 4, 0, 3, 3, 2):
        assert store.get(kept[number])[0, 0] == number


def test_memory_is_used_again() -> None:
    store = HostStore(block_bytes=1024)
    for _ in range(3):
        kept = put_all(store, numbered(4))
        assert [float(store.get(place)[1, 2]) for place in reversed(kept)] == [3.0, 2.0, 1.0, 0.0]
        del kept
        gc.collect()
    assert store.host_bytes == 4 * 8 * 1024


def test_a_forward_pass_without_backward_leaves_nothing() -> None:
    store = HostStore(block_bytes=1024)
    lost = put_all(store, numbered(3))
    del lost
    gc.collect()
    kept = put_all(store, numbered(3))
    assert store.host_bytes == 3 * 8 * 1024
    assert [float(store.get(place)[0, 0]) for place in reversed(kept)] == [2.0, 1.0, 0.0]
