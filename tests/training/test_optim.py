from __future__ import annotations

import torch
from torch import nn

from longnet.training.optim import build_optimizer, parameter_groups


class Tiny(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def members(model: nn.Module, group: dict) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_only_matrices_that_are_not_embeddings_decay():
    model = Tiny(tied=False)
    decay, keep = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    assert members(model, decay) == {"proj.weight", "head.weight"}
    assert members(model, keep) == {"embed.weight", "proj.bias", "norm.weight", "norm.bias"}


def test_a_tied_head_does_not_decay_and_is_stepped_once():
    model = Tiny(tied=True)
    decay, keep = parameter_groups(model, 0.1)
    assert members(model, decay) == {"proj.weight"}
    assert len(decay["params"]) + len(keep["params"]) == len(list(model.parameters()))


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = Tiny(tied=True)
    model.proj.weight.requires_grad_(False)
    (keep,) = parameter_groups(model, 0.1)
    assert keep["weight_decay"] == 0.0


def test_decay_shrinks_only_its_own_group():
    torch.manual_seed(0)
    model = Tiny(tied=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, lr=0.5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.proj.weight, before["proj.weight"] * 0.95)
    assert torch.equal(model.embed.weight, before["embed.weight"])
    assert torch.equal(model.norm.weight, before["norm.weight"])
