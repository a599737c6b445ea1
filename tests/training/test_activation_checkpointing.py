from __future__ import annotations

import copy
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from longnet.model import LongNetForCausalLM
from longnet.training import activation_checkpointing

from ..model.models import DILATED, HYBRID, PAPER, WINDOW, small_model, some_tokens

LAYERS = 4


def model_with(kind: str = "none", every: int = 1, **changes: Any) -> LongNetForCausalLM:
    changes = {"num_hidden_layers": LAYERS, "dropout": 0.1, **changes}
    model = small_model(**changes).train()
    activation_checkpointing.apply(model, kind, every)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    tokens = some_tokens()
    torch.manual_seed(7)
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name in expected:
        assert torch.equal(result[name], expected[name]), name


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "form",
    [{"attention": [{**DILATED, "dropout": 0.2}]}, {"attention": HYBRID}, PAPER],
    ids=["attention dropout", "hybrid", "paper"],
)
def test_gradients_are_the_same_bit_for_bit(kind: str, every: int, form: dict[str, Any]) -> None:
    assert_same(gradients(model_with(kind, every, **form)), gradients(model_with(**form)))


@pytest.mark.parametrize(
    ("kind", "every", "attention_again", "products_again"),
    [("none", 1, 0, 0), ("full", 1, 4, 4), ("selective", 1, 0, 4), ("full", 3, 2, 2), ("selective", 2, 0, 2)],
)
@pytest.mark.parametrize(
    ("block", "op"),
    [
        (DILATED, "longnet::dilated_forward"),
        ({"name": "dense"}, "longnet::dilated_forward"),
        (WINDOW, "aten::_scaled_dot_product_flash_attention_for_cpu"),
    ],
    ids=["dilated", "dense", "sliding_window"],
)
def test_what_is_computed_again(
    kind: str, every: int, attention_again: int, products_again: int, block: dict[str, Any], op: str
) -> None:
    with CountOps() as once:
        gradients(model_with(attention=[block]))
    with CountOps() as counted:
        gradients(model_with(kind, every, attention=[block]))
    assert once.calls[op] == LAYERS
    assert counted.calls[op] - once.calls[op] == attention_again
    # A layer's 7 products; the last one of what is computed again may be left out, since nothing needs its output.
    products = counted.calls["aten::mm"] - once.calls["aten::mm"]
    assert 6 * products_again <= products <= 7 * products_again


def test_names_and_weights_stay() -> None:
    plain, checkpointed = model_with(), model_with("selective")
    assert_same(checkpointed.state_dict(), plain.state_dict())
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_copy_trains_its_own_weights() -> None:
    original = model_with("full")
    twin = copy.deepcopy(original)
    assert_same(gradients(twin), gradients(model_with()))
    assert all(parameter.grad is None for parameter in original.parameters())


def test_the_last_call_counts() -> None:
    model = model_with("full")
    activation_checkpointing.apply(model, "none")
    assert all(layer.recompute is None for layer in model.model.layers)
    activation_checkpointing.apply(model.model, "selective", every=2)
    assert [layer.recompute is not None for layer in model.model.layers] == [True, False, True, False]


def test_without_gradients_nothing_is_kept() -> None:
    model = model_with("selective").eval()
    with torch.no_grad(), CountOps() as counted:
        logits = model(some_tokens()).logits
    assert counted.calls["longnet::dilated_forward"] == LAYERS
    assert torch.equal(logits, model(some_tokens()).logits)


def test_compiled_layers_are_checkpointed_too() -> None:
    def compiled(kind: str) -> tuple[dict[str, Tensor], int]:
        model = model_with(kind)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        gradients(model)
        model.zero_grad()
        with profile() as record:
            grads = gradients(model)
        return grads, sum(event.count for event in record.key_averages() if event.key == "longnet::dilated_forward")

    torch._dynamo.reset()
    expected, once = compiled("none")
    for kind, again in (("full", LAYERS), ("selective", 0)):
        grads, calls = compiled(kind)
        assert_same(grads, expected)
        assert calls - once == again


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_under_ddp(kind: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(model_with(kind))
        grads = gradients(model)
        assert_same({name.removeprefix("module."): grad for name, grad in grads.items()}, gradients(model_with()))
    finally:
        dist.destroy_process_group()


def test_bad_input_is_named() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"kind='selectiv': expected one of .*did you mean 'selective'"):
        activation_checkpointing.apply(model, "selectiv")
    with pytest.raises(ValueError, match=r"every=0: expected an integer >= 1"):
        activation_checkpointing.apply(model, "full", every=0)


def test_every_attention_of_ours_is_kept():
    importlib.import_module("longnet.attention.window")
    importlib.import_module("longnet.parallel.attention")
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("longnet::")}
    assert {name for name in ours if name.endswith("_forward")} == {
        name for name in activation_checkpointing.KEPT_OPS if "longnet" in name
    }
