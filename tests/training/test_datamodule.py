from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from longnet.data import Corpus, build_corpus
from longnet.training.datamodule import TextDataModule

CONTEXT = 64


@pytest.fixture(scope="module")
def corpus(corpus_path) -> Corpus:
    return build_corpus("stdlib", path=str(corpus_path), context_length=CONTEXT, validation_fraction=0.3)


def attached(corpus: Corpus, rank: int = 0, step: int = 0, **options) -> TextDataModule:
    data = TextDataModule(corpus, **options)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(
        global_rank=rank, world_size=options.get("data_world", 1), global_step=step, strategy=strategy
    )
    return data


def steps(data: TextDataModule, number: int) -> list[torch.Tensor]:
    return [batch["input_ids"] for batch in islice(data.train_dataloader(), number)]


def test_a_batch_is_the_whole_step_and_processes_share_it(corpus):
    alone = steps(attached(corpus, batch_size=8, seed=3), 5)
    ranks = [steps(attached(corpus, rank, batch_size=2, accumulate=2, data_world=2, seed=3), 5) for rank in range(2)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_training_begins_at_the_trainers_step(corpus):
    expected = steps(attached(corpus, batch_size=4), 6)[4:]
    resumed = steps(attached(corpus, batch_size=4, step=4), 2)
    assert all(map(torch.equal, expected, resumed))


@pytest.mark.parametrize("val_batches", [None, 1, 2, 1000])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (3, 1), (2, 2)])
def test_validation_predicts_exactly_the_bytes_it_is_measured_by(corpus, val_batches, batch_size, world_size):
    batches = []
    for rank in range(world_size):
        data = attached(corpus, rank, batch_size=batch_size, data_world=world_size, val_batches=val_batches)
        batches.append(list(data.val_dataloader()))
    assert len({len(of_rank) for of_rank in batches}) == 1
    in_order = [batch["labels"] for step in zip(*batches, strict=True) for batch in step]
    content = corpus.tokenizer.decode(torch.cat(in_order).flatten().numpy())
    assert content == data.validation_content()
    assert len(content) == data.validation_bytes


def test_overfitting_trains_and_validates_on_the_same_few_rows(corpus):
    data = attached(corpus, batch_size=2, overfit_batches=1)
    trained = {tuple(row.tolist()) for batch in steps(data, 5) for row in batch}
    validated = {tuple(row.tolist()) for batch in data.val_dataloader() for row in batch["input_ids"]}
    assert trained == validated
    assert len(trained) == 2
