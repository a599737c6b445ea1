"""One step of the module against the loss and its gradient written down plainly."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from longnet.config.schema import OptimConfig
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.training.module import LongNetModule

CONTEXT = 32


class Watched(LongNetModule):
    """Keeps the gradients that the optimiser is about to see."""

    def on_before_optimizer_step(self, optimizer):
        self.unclipped = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        super().on_before_optimizer_step(optimizer)
        self.clipped = {name: p.grad.clone() for name, p in self.model.named_parameters()}


def build(micro_batch_size: int = 2, **optim) -> Watched:
    torch.manual_seed(0)
    config = LongNetConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        attention=[{"name": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]}],
    )
    return Watched(
        LongNetForCausalLM(config), OptimConfig(**optim), max_steps=4, micro_batch_size=micro_batch_size, seed=1
    )


def uneven_rows() -> dict[str, torch.Tensor]:
    """Rows with 32, 20, 3 and 0 labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (4, CONTEXT + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row, valid in enumerate((CONTEXT, 20, 3, 0)):
        labels[row, valid:] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def step(module: LongNetModule, batch: dict[str, torch.Tensor], steps: int = 1, **options) -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_loss_and_gradient_are_the_mean_over_tokens_however_the_rows_are_split(micro_batch_size):
    batch = uneven_rows()
    truth = build()
    logits = truth.model(batch["input_ids"]).logits
    expected = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    expected.backward()

    module = build(micro_batch_size, gradient_clip=0.0)
    step(module, batch)
    for name, parameter in truth.model.named_parameters():
        torch.testing.assert_close(module.unclipped[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert module.window_tokens == module.tokens_seen == 55
    assert module.take_window() == pytest.approx(expected.item(), rel=1e-6)
    assert module.window_tokens == 0
    assert module.tokens_seen == 55


def test_gradients_are_clipped_by_their_global_norm_and_the_norm_before_is_kept():
    module = build(gradient_clip=0.01)
    step(module, uneven_rows())
    norm = torch.cat([g.flatten() for g in module.unclipped.values()]).norm()
    clipped = torch.cat([g.flatten() for g in module.clipped.values()]).norm()
    assert module.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_z_loss_is_trained_on_but_not_reported():
    plain, with_z = build(), build(z_loss=1.0)
    step(plain, uneven_rows())
    step(with_z, uneven_rows())
    assert plain.gradient_norm != with_z.gradient_norm
    assert plain.take_window() == with_z.take_window()


def test_fp16_gradients_are_unscaled_before_they_are_clipped():
    exact, half = build(gradient_clip=0.5), build(gradient_clip=0.5)
    step(exact, uneven_rows())
    # Lightning makes this only for GPUs; torch has it for CPUs too.
    precision = MixedPrecision("16-mixed", "cpu")
    step(half, uneven_rows(), plugins=[precision])
    assert precision.scaler.get_scale() > 1
    assert not half.trainer.optimizers[0].defaults["fused"]
    assert half.gradient_norm == pytest.approx(exact.gradient_norm.item(), rel=0.02)


def test_the_learning_rate_follows_the_schedule():
    module = build(lr=0.5, warmup_steps=2, schedule="linear", min_lr_ratio=0.0)
    rates = []
    optimizer_step = module.on_before_optimizer_step
    module.on_before_optimizer_step = lambda optimizer: (
        rates.append([group["lr"] for group in optimizer.param_groups]),
        optimizer_step(optimizer),
    )
    step(module, uneven_rows(), steps=4)
    assert rates == [[0.25, 0.25], [0.5, 0.5], [0.25, 0.25], [0.0, 0.0]]


def test_a_step_with_no_labels_moves_nothing_and_is_not_nan():
    batch = uneven_rows()
    batch["labels"].fill_(-100)
    module = build(weight_decay=0.0)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    step(module, batch)
    assert all(torch.equal(value, before[name]) for name, value in module.model.state_dict().items())
    assert module.gradient_norm == 0


def test_isolated_documents_are_trained_on_as_if_each_were_alone():
    """Loss and gradient of packed rows against those of the documents, one forward pass each."""
    module = build(micro_batch_size=2)
    batch = uneven_rows()
    lengths = [[10, 22], [20, 12], [3, 29], [32]]
    step(module, {**batch, "lengths": lengths})
    packed = module.unclipped

    plain = build()
    total = torch.zeros(())
    for row, of_row in enumerate(lengths):
        start = 0
        for length in of_row:
            part = slice(start, start + length)
            hidden = plain.model.model(batch["input_ids"][row : row + 1, part])
            logits = plain.model.lm_head(hidden)[0]
            total = total + cross_entropy(logits, batch["labels"][row, part], reduction="sum", ignore_index=-100)
            start += length
    (total / (batch["labels"] != -100).sum()).backward()
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-6)
    # Were the documents not kept apart, another gradient would come out.
    mixed = build()
    step(mixed, batch)
    assert any(not torch.allclose(packed[name], mixed.unclipped[name], rtol=1e-3, atol=1e-6) for name in packed)
