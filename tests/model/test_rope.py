from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from longnet.model.rope import LongNetRotaryEmbedding, document_positions, rotate

from .models import small_config

ROPE_TYPES = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]  # fmt: skip


def rotated(embedding: LongNetRotaryEmbedding, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotation = embedding(q, positions)
    return rotate(q, *rotation[:2]), rotate(k, *rotation[2:])


def scores(embedding: LongNetRotaryEmbedding, q: Tensor, k: Tensor, query_at: int, key_at: int) -> Tensor:
    q, k = rotated(embedding, q.expand(1, 2, -1, -1), k.expand(1, 2, -1, -1), torch.tensor([[query_at, key_at]]))
    return (q[:, 0] * k[:, 1]).sum(-1)


def random_heads(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return q, k


@pytest.mark.parametrize("rope", ROPE_TYPES, ids=lambda rope: rope["rope_type"])
def test_rotates_as_transformers_does(rope: dict[str, Any]) -> None:
    config = small_config(rope_parameters=rope)
    llama = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, rope_parameters=dict(rope))
    q, k = random_heads(2, 100, 4, 8)
    # Longer than the context, which is what the dynamic type is about.
    positions = torch.arange(100)[None]
    ours = rotated(LongNetRotaryEmbedding(config), q, k, positions)
    cos, sin = LlamaRotaryEmbedding(llama)(q, positions)
    theirs = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_partial_rotation_leaves_the_rest() -> None:
    config = small_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    q, k = random_heads(1, 10, 4, 8)
    turned, _ = rotated(LongNetRotaryEmbedding(config), q, k, torch.arange(10)[None])
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert not torch.equal(turned[..., :4], q[..., :4])


@pytest.mark.parametrize("position_embedding", ["rope", "xpos"])
@pytest.mark.parametrize("offset", [1000, 30_000_000, 2**30 - 1000])
def test_scores_depend_on_the_distance_only(position_embedding: str, offset: int) -> None:
    """Also where float32 holds no position's angle any more."""
    config = small_config(position_embedding=position_embedding, max_position_embeddings=2**30, rope_theta=1e6)
    embedding = LongNetRotaryEmbedding(config)
    q, k = random_heads(1, 1, 4, 8)
    near = scores(embedding, q, k, 700, 20)
    far = scores(embedding, q, k, 700 + offset, 20 + offset)
    torch.testing.assert_close(near, far, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("distance", [0, 3, 500])
def test_xpos_fades_each_frequency_by_its_own_rate(distance: int) -> None:
    config = small_config(position_embedding="xpos", max_position_embeddings=4096)
    embedding = LongNetRotaryEmbedding(config)
    q, k = random_heads(1, 1, 1, 8)
    expected = 0.0
    for pair in range(4):
        angle = distance * 10000 ** (-pair / 4)
        fading = ((pair / 4 + 0.4) / 1.4) ** (distance / 512)
        (a, b), (c, d) = ((x[0, 0, 0, pair].item(), x[0, 0, 0, pair + 4].item()) for x in (q, k))
        cos, sin = math.cos(angle), math.sin(angle)
        expected += fading * ((a * cos - b * sin) * c + (a * sin + b * cos) * d)
    assert scores(embedding, q, k, 600 + distance, 600).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", [32768, 2**20, 2**30])
def test_xpos_stays_in_range_from_end_to_end(context: int) -> None:
    embedding = LongNetRotaryEmbedding(small_config(position_embedding="xpos", max_position_embeddings=context))
    q, k = random_heads(1, 3, 4, 8, dtype=torch.bfloat16)
    q, k = rotated(embedding, q, k, torch.tensor([[0, context // 2, context - 1]]))
    for x in (q, k):
        assert x.isfinite().all()
        assert (x != 0).all()


def test_xpos_refuses_float16_where_it_would_overflow() -> None:
    embedding = LongNetRotaryEmbedding(small_config(position_embedding="xpos", max_position_embeddings=32768))
    positions = torch.arange(4)[None]
    with pytest.raises(ValueError, match=r"float16 at max_position_embeddings=32768.*2\*\*58.*bfloat16, or .*>= 3702"):
        embedding(torch.zeros(1, dtype=torch.float16), positions)
    wider = small_config(position_embedding="xpos", max_position_embeddings=32768, xpos_scale_base=3702)
    rotation = LongNetRotaryEmbedding(wider)(torch.zeros(1, dtype=torch.float16), positions)
    assert all(table.abs().max() < 2**9 for table in rotation)


def test_casting_a_model_keeps_the_frequencies() -> None:
    embedding = LongNetRotaryEmbedding(small_config())
    exact = embedding.inv_freq.clone()
    embedding.to(torch.bfloat16)
    assert torch.equal(embedding.inv_freq, exact)
    assert torch.equal(embedding.half().original_inv_freq, exact)
    assert embedding.to("meta").inv_freq.is_meta


def test_positions_restart_at_each_document() -> None:
    positions = document_positions(torch.tensor([0, 3, 4, 8], dtype=torch.int32), 8)
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
