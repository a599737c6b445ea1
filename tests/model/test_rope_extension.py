"""RoPE for longer contexts: transformers' own kinds, and what they do to the waves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longnet.model import LongNetForCausalLM
from longnet.model.rope_extension import KINDS, extend_rope

from .models import small_config, some_tokens


def waves(**changes: Any) -> torch.Tensor:
    return LongNetForCausalLM(small_config(**changes)).model.rotary_emb.inv_freq


def test_what_each_kind_does_to_the_waves() -> None:
    config = small_config(max_position_embeddings=64)
    before = waves()
    after = {kind: waves(**extend_rope(config, kind, 256, theta=2e4)) for kind in KINDS}
    torch.testing.assert_close(after["keep"], before)
    torch.testing.assert_close(after["linear"], before / 4)
    for kind in ("ntk", "yarn"):
        assert after[kind][0] == pytest.approx(before[0].item()), kind
    assert after["ntk"][-1] == pytest.approx(before[-1].item() / 4)
    assert after["yarn"][-1] == pytest.approx(before[-1].item() / 4)
    torch.testing.assert_close(after["base"], waves(rope_parameters={"rope_type": "default", "rope_theta": 2e4}))
    assert extend_rope(config, "yarn", 256)["max_position_embeddings"] == 256


def test_dynamic_is_the_model_itself_within_its_context_and_ntk_at_the_end_of_the_new() -> None:
    torch.manual_seed(0)
    plain = LongNetForCausalLM(small_config(attention=["dense"])).eval()
    results = {}
    for kind in ("dynamic", "ntk"):
        config = small_config(attention=["dense"], **extend_rope(plain.config, kind, 256))
        results[kind] = LongNetForCausalLM(config).eval()
        results[kind].load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(results["dynamic"](some_tokens(1, 64)).logits, plain(some_tokens(1, 64)).logits)
        long = some_tokens(1, 256)
        torch.testing.assert_close(results["dynamic"](long).logits, results["ntk"](long).logits, atol=1e-4, rtol=1e-4)


def test_says_what_does_not_fit() -> None:
    config = small_config(max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"rope='yarm': .*did you mean 'yarn'"):
        extend_rope(config, "yarm", 256)
    with pytest.raises(ValueError, match=r"theta=None: expected a number above 0 with rope='base'"):
        extend_rope(config, "base", 256)
    with pytest.raises(ValueError, match=r"context=32 is shorter than the model's own: .*at least 64"):
        extend_rope(config, "linear", 32)
    scaled = small_config(**extend_rope(config, "yarn", 256))
    with pytest.raises(ValueError, match=r"already scaled, by 'yarn'"):
        extend_rope(scaled, "linear", 512)
