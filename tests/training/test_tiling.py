from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longnet.config.schema import FinetuneConfig
from longnet.model import LongNetForCausalLM
from longnet.training import activation_checkpointing, tiling
from longnet.training.finetune import choose_trained
from longnet.training.loss import linear_cross_entropy

from ..model.models import DILATED, HYBRID, PAPER, small_model, some_tokens

KINDS = ["none", "selective", "full", "offload"]
LENGTH = 40
FORMS = {"llama": {}, "hybrid": {"attention": HYBRID, "num_hidden_layers": 5}, "paper": PAPER}


def model_with(kind: str = "none", tile: int | None = None, every: int = 1, **changes: Any) -> LongNetForCausalLM:
    model = small_model(**{"num_hidden_layers": 3, **changes}).train().double()
    activation_checkpointing.apply(model, kind, every, tile)
    return model


def loss_and_gradients(model: LongNetForCausalLM, tokens: Tensor | None = None) -> dict[str, Tensor]:
    tokens = some_tokens(length=LENGTH) if tokens is None else tokens
    torch.manual_seed(7)
    hidden = model.model(tokens)
    sums = linear_cross_entropy(hidden[:, :-1].flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten())
    with torch.autocast("cpu", enabled=False):
        sums.loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": sums.loss.detach(), "hidden": hidden.detach(), **grads}


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert result.keys() == expected.keys()
    for name in expected:
        error = (result[name] - expected[name]).norm() / expected[name].norm()
        assert error < tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [7, 8, 40, 64])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_whole_layers(kind: str, tile: int, form: str) -> None:
    assert_close(
        loss_and_gradients(model_with(kind, tile, **FORMS[form])), loss_and_gradients(model_with(**FORMS[form]))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_layer(kind: str) -> None:
    assert_close(loss_and_gradients(model_with(kind, 16, every=2)), loss_and_gradients(model_with()))


@pytest.mark.parametrize("every", [1, 2])
def test_offload_without_tiles(every: int) -> None:
    result, expected = loss_and_gradients(model_with("offload", every=every)), loss_and_gradients(model_with())
    assert torch.equal(result["hidden"], expected["hidden"])
    assert_close(result, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("attention_dropout", "lora_dropout"), [(0.0, None), (0.3, None), (0.3, 0.3)])
def test_dropout_is_the_same_again_in_backward(kind: str, attention_dropout: float, lora_dropout: float | None) -> None:
    """Against finite differences, since tiles draw other numbers than whole layers do."""
    model = model_with(kind, 16, dropout=0.2, attention=[{**DILATED, "dropout": attention_dropout}])
    if lora_dropout is not None:
        choose_trained(model, FinetuneConfig(train="lora", lora_dropout=lora_dropout, lora_rank=4))
        model.double()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                # They begin as 0, which nothing would come through.
                torch.nn.init.normal_(weight, std=0.02)
    direction = {name: torch.randn_like(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    found = loss_and_gradients(model)
    slope = sum((found[name] * direction[name]).sum() for name in direction)

    def loss_at(step: float) -> Tensor:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name in direction:
                moved.get_parameter(name).add_(direction[name], alpha=step)
        return loss_and_gradients(moved)["loss"]

    assert torch.isclose((loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, torch.as_tensor(slope), rtol=1e-6)


@pytest.mark.parametrize("kind", ["selective", "offload"])
def test_in_mixed_precision_no_worse_than_whole_layers(kind: str) -> None:
    tokens = some_tokens(1, 256)
    exact = loss_and_gradients(model_with(max_position_embeddings=256), tokens)

    def error(tile: int | None, residual: torch.dtype | None) -> float:
        model = model_with(kind, tile, max_position_embeddings=256).float()
        model.model.residual_dtype = residual
        with torch.autocast("cpu", torch.bfloat16):
            found = loss_and_gradients(model, tokens)
        assert found["hidden"].dtype == (residual or torch.float32)
        return float(sum((found[name] - exact[name]).norm() / exact[name].norm() for name in exact))

    # Many tiles, whose gradients would lose their low bits if they were added up in bfloat16.
    assert error(4, None) < 1.05 * error(None, None)
    assert error(4, torch.bfloat16) < 1.05 * error(None, torch.bfloat16)


def test_weights_in_bfloat16_are_summed_in_float32() -> None:
    tokens = some_tokens(1, 256)
    exact = loss_and_gradients(model_with(max_position_embeddings=256).bfloat16().double(), tokens)

    def error(tile: int | None) -> float:
        found = loss_and_gradients(model_with("full", tile, max_position_embeddings=256).bfloat16(), tokens)
        return float(sum((found[name].double() - exact[name]).norm() / exact[name].norm() for name in exact))

    assert error(4) < 1.05 * error(None)


def test_without_gradients() -> None:
    plain, tiled = model_with().eval(), model_with("offload", 8).eval()
    with torch.no_grad():
        assert torch.allclose(tiled(some_tokens()).logits, plain(some_tokens()).logits, rtol=1e-12)
    assert torch.allclose(tiled(some_tokens()).logits, plain(some_tokens()).logits, rtol=1e-12)


def test_packed_documents() -> None:
    borders = torch.tensor([0, 13, 40])
    plain, tiled = (model(some_tokens(1), cu_seqlens=borders).logits for model in (model_with(), model_with("full", 8)))
    assert torch.allclose(tiled, plain, rtol=1e-12)


def test_frozen_weights() -> None:
    plain, tiled = model_with(), model_with("full", 8)
    for model in (plain, tiled):
        model.model.embed_tokens.weight.requires_grad_(False)
        for weight in model.model.layers[0].parameters():
            weight.requires_grad_(False)
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    assert_close(loss_and_gradients(tiled), loss_and_gradients(plain))


def test_names_and_weights_stay() -> None:
    plain, tiled = model_with(), model_with("offload", 8)
    assert plain.state_dict().keys() == tiled.state_dict().keys()
    assert [name for name, _ in tiled.named_modules()] == [name for name, _ in plain.named_modules()]


def test_the_last_call_counts() -> None:
    model = model_with("offload", 8)
    activation_checkpointing.apply(model, "full", every=2)
    assert model.model.tiles is None
    assert all(layer.tiles is None for layer in model.model.layers)
    assert [layer.recompute is not None for layer in model.model.layers] == [True, False, True]


def test_tiles_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    tiling._tile_code.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = model_with("full", 16)
    expected = loss_and_gradients(model)
    model.zero_grad()
    activation_checkpointing.apply(model, "full", tile=16, compiled=True)
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    assert_close(loss_and_gradients(model), expected)
    # Two functions, without and with gradients, for tiles of 16 and the last of 8; all layers share these.
    assert frames["total"] - before == 8
    assert frames["ok"] == frames["total"]
    tiling._tile_code.cache_clear()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"tile=0: expected an integer >= 1"):
        activation_checkpointing.apply(small_model(), "none", tile=0)


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_mlps_width_is_at_full_length(kind: str) -> None:
    tokens = some_tokens(1, 256)
    model = model_with(kind, 32, intermediate_size=100, max_position_embeddings=256)
    with LargestTensor() as largest:
        model.model(tokens).sum().backward()
    assert largest.elements == 256 * 32
    activation_checkpointing.apply(model, kind)
    with LargestTensor() as largest:
        model.model(tokens).sum().backward()
    assert largest.elements >= 256 * 100


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, compiled: bool) -> None:
    length, shape = 4096, {"hidden_size": 256, "intermediate_size": 1024, "initializer_range": 0.02}
    pattern = [{"name": "dilated", "segment_lengths": [512, 4096], "dilation_rates": [1, 8]}]
    tokens = some_tokens(1, length).cuda()

    def measure(kind: str, tile: int | None) -> dict[str, Tensor]:
        model = model_with(attention=pattern, max_position_embeddings=length, **shape).float().cuda()
        model.model.residual_dtype = torch.bfloat16
        activation_checkpointing.apply(model, kind, tile=tile, compiled=compiled)
        # Twice, since the second step takes its host memory from the first.
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model.model(tokens)
                sums = linear_cross_entropy(hidden[0, :-1], model.lm_head.weight, tokens[0, 1:], backend="chunked")
            sums.loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    assert_close(measure(kind, 1000), measure("none", None), tolerance=2e-2)
    if not compiled:
        for name, grad in measure("full", 1000).items():
            assert torch.equal(measure(kind, 1000)[name], grad) or kind != "offload", name


@pytest.mark.gpu
def test_offloaded_inputs_are_not_on_the_gpu() -> None:
    length, layers, width = 2**17, 8, 256
    tokens = some_tokens(1, length).cuda()
    input_bytes = length * width * 2

    def kept_bytes(kind: str) -> int:
        model = small_model(
            num_hidden_layers=layers, hidden_size=width, max_position_embeddings=length,
            attention=[{"name": "dilated", "segment_lengths": [2048, length], "dilation_rates": [1, 64]}],
        ).train().cuda()  # fmt: skip
        model.model.residual_dtype = torch.bfloat16
        activation_checkpointing.apply(model, kind, tile=8192)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(tokens)
        held = torch.cuda.memory_allocated() - before
        hidden.sum().backward()
        return held

    # The newest layer's input has not left yet.
    assert abs(kept_bytes("full") - kept_bytes("offload") - (layers - 1) * input_bytes) < 0.1 * input_bytes
