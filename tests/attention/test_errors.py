"""Bad input gets a ValueError with the argument, its value, what was expected and the nearest thing that works."""

from typing import Any

import pytest
import torch

from longnet.attention import DilationPattern, build_block, dilated_attention

PATTERN = DilationPattern((8,), (1,))


def arguments(**changes: Any) -> dict[str, Any]:
    x = torch.randn(1, 16, 4, 8)
    return {"q": x, "k": x, "v": x, "pattern": PATTERN, **changes}


def shaped(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": shaped(16, 4, 8)}, "q has shape (16, 4, 8): expected (batch, positions, heads, head_dim); add a batch"),
        ({"v": shaped(1, 16, 4, 4)}, "v has shape (1, 16, 4, 4): expected that of k, (1, 16, 4, 8)"),
        ({"q": shaped(1, 12, 4, 8)}, "k has shape (1, 16, 4, 8): expected (1, 12, KV heads, 8)"),
        ({"q": shaped(1, 16, 6, 8)}, "k has 4 heads: expected a divisor of q's 6 heads; the nearest is 3"),
        ({"q": shaped(1, 16, 4, 8, dtype=torch.float64)}, "k has dtype torch.float32: expected q's, torch.float64"),
        ({"q": shaped(1, 16, 4, 8, device="meta")}, "k is on cpu: expected q's device, meta"),
        ({name: shaped(1, 16, 4, 8, dtype=torch.int64) for name in "qkv"}, "q has dtype torch.int64"),
        ({name: shaped(1, 0, 4, 8) for name in "qkv"}, "expected no empty dimension"),
        ({"pattern": (8, 1)}, "pattern=(8, 1): expected a DilationPattern, for example"),
        ({"dropout_p": 1.0}, "dropout_p=1.0: expected 0 <= p < 1; nearest: 0.99"),
        ({"scale": 0.0}, "scale=0.0: expected a positive number"),
        ({"backend": "spda"}, "backend='spda': expected 'auto' or one of ['sdpa', 'reference']; nearest: 'sdpa'"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens=[0, 9]: expected rising borders from 0 to the row's 16"),
        ({"cu_seqlens": torch.tensor([0, 9, 9, 16])}, "for example [0, 9, 16]"),
        ({"cu_seqlens": torch.tensor([1, 16])}, "cu_seqlens=[1, 16]"),
        ({"cu_seqlens": torch.tensor([0.0, 16.0])}, "expected integers of shape (documents + 1,)"),
        ({"cu_seqlens": torch.tensor(16)}, "expected integers of shape (documents + 1,)"),
        (
            {**{n: shaped(2, 16, 4, 8) for n in "qkv"}, "cu_seqlens": torch.tensor([0, 16])},
            "batch 1, got q of",
        ),
    ],
)
def test_operator_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        dilated_attention(**arguments(**changes))
    assert message in str(error.value)


def test_a_backend_that_cannot_says_why() -> None:
    x = torch.zeros(1, 1, 1, 8).expand(1, 2**16, 4, 8)
    with pytest.raises(ValueError, match=r"backend='reference' cannot do this: it holds all scores.*use 'sdpa'"):
        dilated_attention(x, x, x, PATTERN, backend="reference")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"name": "dilate"},
            "'dense', 'dilated', 'sliding_window']; nearest: 'dilated'",
        ),
        ({}, "attention block name=None"),
        ({"name": "sliding_window"}, "missing 1 required positional argument: 'window'"),
        ({"name": "sliding_window", "window": 0}, "window=0: expected an integer >= 1"),
        ({"name": "dense", "window": 4}, "unexpected keyword argument 'window'"),
        ({"name": "dilated", "segment_lengths": [4], "dilation_rates": [8]}, "dilation_rates[0]=8 is larger"),
    ],
)
def test_block_errors(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_block(spec)
    assert message in str(error.value)
