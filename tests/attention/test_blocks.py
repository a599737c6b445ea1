"""The swappable blocks: one interface, each against its own definition."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longnet.attention import BLOCKS, build_block, reference_attention
from longnet.attention.masked import BlockSparse, SlidingWindow

SPECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dilated": {"segment_lengths": [64, 128], "dilation_rates": [1, 2]},
    "sliding_window": {"window": 70},
    "block_sparse": {"block_size": 24, "local_blocks": 2, "stride": 3, "global_blocks": 1},
}
LENGTHS = [1, 100, 128, 300, 515]


def visible(block: torch.nn.Module, seq_len: int) -> Tensor:
    """Which pairs a masked block may see, written down once more in plain numbers."""
    pairs = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for n in range(seq_len):
        for m in range(n + 1):
            if isinstance(block, SlidingWindow):
                pairs[n, m] = n - m < 70
            else:
                a, b = n // 24, m // 24
                pairs[n, m] = a - b < 2 or (a - b) % 3 == 0 or b < 1
    return pairs


def expected(block: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if isinstance(block, (SlidingWindow, BlockSparse)):
        mask = visible(block, q.shape[1]).to(q.device)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return reference_attention(q, k, v, block.pattern)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_each_block_is_its_definition(name: str, seq_len: int, device: str) -> None:
    block = build_block({"name": name, **SPECS[name]})
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v = (
        torch.randn(2, seq_len, heads, 16, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    grad = torch.randn_like(q)
    found, truth = block(q, k, v), expected(block, q, k, v)
    results = zip(
        (found, *torch.autograd.grad(found, (q, k, v), grad)),
        (truth, *torch.autograd.grad(truth, (q, k, v), grad)),
        strict=True,
    )
    for ours, theirs in results:
        limit = 1e-12 if device == "cpu" else 5e-3
        assert (ours - theirs).norm() <= limit * max(theirs.norm().item(), 1.0)


@pytest.mark.parametrize("name", SPECS)
def test_packed_documents_are_alone(name: str) -> None:
    block = build_block({"name": name, **SPECS[name]})
    q, k, v = (torch.randn(1, 330, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    packed = block(q, k, v, cu_seqlens=torch.tensor([0, 7, 200, 330]))
    for begin, end in ((0, 7), (7, 200), (200, 330)):
        torch.testing.assert_close(packed[:, begin:end], block(*(x[:, begin:end] for x in (q, k, v))))


@pytest.mark.parametrize("name", ["sliding_window", "block_sparse"])
def test_flops_count_the_visible_pairs(name: str) -> None:
    block = build_block({"name": name, **SPECS[name]})
    assert block.flops(300, 4, 8) == 4 * 8 * 4 * int(visible(block, 300).sum())  # type: ignore[operator]


def test_every_block_is_tested_and_has_no_parameters() -> None:
    assert set(SPECS) == set(BLOCKS)
    for name, spec in SPECS.items():
        assert not list(build_block({"name": name, **spec}).parameters())


def test_block_masks_are_shared_between_equal_blocks_only() -> None:
    assert SlidingWindow(5).mask == SlidingWindow(5).mask
    assert hash(SlidingWindow(5).mask) == hash(SlidingWindow(5).mask)
    assert SlidingWindow(5).mask != SlidingWindow(6).mask
    assert SlidingWindow(5) != SlidingWindow(5)


def test_dropout_only_in_training() -> None:
    block = build_block({"name": "dilated", **SPECS["dilated"], "dropout": 0.5})
    q = torch.randn(1, 50, 4, 8)
    assert not torch.equal(block(q, q, q), block(q, q, q))
    block.eval()
    assert torch.equal(block(q, q, q), block(q, q, q))
