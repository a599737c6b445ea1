"""The drop-in modules."""

import pytest
import torch
from torch import nn

from longnet.attention import DilatedAttention, DilationPattern, MultiheadDilatedAttention, dilated_attention


def test_dilated_attention_module_is_the_operator() -> None:
    q, k, v = (torch.randn(2, 30, heads, 8) for heads in (4, 2, 2))
    for heads in ("all", "grouped"):
        module = DilatedAttention([8, 16], [1, 2], softmax_scale=0.2, heads=heads)
        pattern = DilationPattern((8, 16), (1, 2), heads=heads)
        for causal in (False, True):
            expected = dilated_attention(q, k, v, pattern, causal=causal, scale=0.2)
            assert torch.equal(module(q, k, v, is_causal=causal), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_stands_in_for_multihead_attention(bias: bool, causal: bool, same: bool) -> None:
    """With one segment that holds everything, the same state dict gives the same result and gradient."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True).double()
    ours = MultiheadDilatedAttention(32, 4, [64], [1], bias=bias).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    inputs = (x, x, x) if same else (x, x + 1, x - 1)
    mask = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64) if causal else None
    expected, _ = theirs(*inputs, attn_mask=mask, is_causal=causal, need_weights=False)
    found, weights = ours(*inputs, is_causal=causal)
    assert weights is None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad((out * out).sum(), x)[0] for out in (found, expected)))


def test_initial_weights_are_those_of_multihead_attention() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    torch.manual_seed(0)
    ours = MultiheadDilatedAttention(32, 4, [8], [1])
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    assert ours.in_proj_weight.std().item() == pytest.approx(theirs.in_proj_weight.std().item(), rel=0.1)
    assert not ours.out_proj.bias.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_trains_in_every_dtype(dtype: torch.dtype, layer_norm: bool) -> None:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2], layer_norm=layer_norm)
    x = torch.randn(2, 30, 32)
    expected, _ = module(x, x, x, is_causal=True)
    x = x.to(dtype)
    found, _ = module.to(dtype)(x, x, x, is_causal=True)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() < 0.02 * expected.norm()
    found.float().square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_magneto_norm_sits_before_the_output_projection() -> None:
    module = MultiheadDilatedAttention(32, 4, [8], [1], layer_norm=True)
    seen = []
    assert module.norm is not None
    module.out_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    x = torch.randn(2, 30, 32)
    module(x, x, x)
    torch.testing.assert_close(seen[0].mean(-1), torch.zeros(2, 30), atol=1e-5, rtol=0)
    assert seen[0].std(-1, unbiased=False).mean().item() == pytest.approx(1.0, abs=0.01)


def test_dropout_only_in_training() -> None:
    module = MultiheadDilatedAttention(32, 4, [8], [1], dropout=0.5)
    x = torch.randn(1, 30, 32)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="num_heads=5: expected a divisor of embed_dim=32; nearest: 4"):
        MultiheadDilatedAttention(32, 5, [8], [1])
    module, x = MultiheadDilatedAttention(32, 4, [8], [1]), torch.randn(1, 30, 32)
    with pytest.raises(ValueError, match="attn_mask is given: .* is_causal=True"):
        module(x, x, x, attn_mask=torch.ones(30, 30))
    with pytest.raises(ValueError, match="key_padding_mask is given: .* cu_seqlens"):
        module(x, x, x, key_padding_mask=torch.ones(1, 30))
    with pytest.raises(ValueError, match=r"query has shape \(30, 32\)"):
        module(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="need_weights=True: attention weights are never formed"):
        module(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match=r"dropout=1.5: expected a probability from 0 to below 1"):
        MultiheadDilatedAttention(32, 4, [8], [1], dropout=1.5)


def test_serves_in_a_layer_of_torchs_own() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadDilatedAttention(32, 4, [8], [1])
    x = torch.randn(2, 30, 32)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), layer.train()(x))
