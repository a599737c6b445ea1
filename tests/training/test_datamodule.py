from __future__ import annotations

import pickle
import time
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from longnet.data import Corpus, build_corpus
from longnet.training.datamodule import TextDataModule
from longnet.training.growth import ContextGrowth

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


def test_before_the_context_grows_rows_are_put_together_from_pieces_of_many(corpus):
    growth = ContextGrowth([(8, 0.5)], 6)
    grown = steps(attached(corpus, batch_size=4, growth=growth), 6)
    whole = steps(attached(corpus, batch_size=4), 6)
    pieces, expected = (torch.cat(batches[:3]).reshape(-1, 8).tolist() for batches in (grown, whole))
    assert pieces != expected
    assert sorted(pieces) == sorted(expected)
    assert all(map(torch.equal, grown[3:], whole[3:]))
    resumed = steps(attached(corpus, batch_size=4, growth=growth, step=2), 2)
    assert all(map(torch.equal, grown[2:], resumed))
    assert "its batch is pieces of rows" in attached(corpus, batch_size=4, growth=growth).describe_batch(0)


def test_a_run_that_goes_on_to_another_end_keeps_the_steps_at_which_its_context_grows(corpus):
    growth = [(8, 0.5)]
    first = attached(corpus, batch_size=4, growth=ContextGrowth(growth, 6))
    whole = steps(first, 6)
    state = _state_after(first, 2)
    longer = attached(corpus, batch_size=4, growth=ContextGrowth(growth, 100), step=2)
    longer.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert [longer.context_of(step) for step in range(5)] == [8, 8, 8, None, None]
    assert all(map(torch.equal, whole[2:], steps(longer, 4)))


def test_the_context_is_that_of_the_data_where_some_of_it_is_left_out(corpus):
    data = attached(corpus, batch_size=4, growth=ContextGrowth([(8, 0.5)], 6))
    data.leave_out(1, 1)
    assert [data.context_of(step) for step in range(4)] == [8, 8, None, None]


def test_what_is_left_out_stays_so_however_often_a_run_goes_back(corpus):
    data = attached(corpus, batch_size=4)
    state = _state_after(data, 4)
    data.leave_out(4, 3)
    data.load_state_dict(state)
    assert data.batch_of(4) == 7
    # Its third batch from there on is bad, too.
    data.leave_out(4, 3)
    data.load_state_dict(state)
    assert data.batch_of(4) == 10
    # What was decided for a later step holds for an earlier one.
    data.leave_out(2, 4)
    assert (data.batch_of(2), data.left_out) == (12, [[2, 10]])


def test_a_task_that_no_piece_can_hold_is_refused():
    made = build_corpus("passkey", context_length=256, samples=8)
    with pytest.raises(ValueError, match=r"finetune.context_growth has 16: length=15 is too short for the task"):
        TextDataModule(made, batch_size=2, growth=ContextGrowth([(16, 0.5)], 6))


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


@pytest.fixture(scope="module")
def stream(corpus_path) -> Corpus:
    options = {"path": str(corpus_path), "context_length": CONTEXT, "validation_fraction": 0.3}
    return build_corpus("stdlib", **options, streaming=True, block_rows=5, packing="isolate", validation_samples=4)


@pytest.mark.parametrize("kind", ["corpus", "stream"])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_after_a_kill_the_next_batch_is_the_one_that_would_have_come(kind, stop, request):
    corpus = request.getfixturevalue(kind)
    whole = steps(attached(corpus, batch_size=2, accumulate=2), stop + 4)

    killed = attached(corpus, batch_size=2, accumulate=2)
    # One batch more is fetched than is trained on, as Lightning does.
    steps(killed, stop + 1)
    killed.trainer.global_step = stop
    state = pickle.loads(pickle.dumps(killed.state_dict()))

    resumed = attached(corpus, step=stop, batch_size=4)
    resumed.load_state_dict(state)
    assert all(map(torch.equal, whole[stop:], steps(resumed, 4)))
    # Saved again before anything was read, it is the same place.
    untouched = attached(corpus, step=stop, batch_size=4)
    untouched.load_state_dict(state)
    assert untouched.state_dict() == state


@pytest.mark.parametrize("kind", ["corpus", "stream"])
def test_another_number_of_ranks_is_exact_or_refused(kind, request):
    corpus = request.getfixturevalue(kind)
    whole = steps(attached(corpus, batch_size=4), 7)
    state = _state_after(attached(corpus, batch_size=4), 3)
    ranks = []
    for rank in range(2):
        resumed = attached(corpus, rank, step=3, batch_size=1, accumulate=2, data_world=2)
        resumed.load_state_dict(state)
        ranks.append(steps(resumed, 4))
    for expected, *parts in zip(whole[3:], *ranks, strict=True):
        assert torch.equal(expected, torch.cat(parts))
    with pytest.raises(ValueError, match="rows_per_step is 8, was 4. The next batch would not be the one"):
        attached(corpus, step=3, batch_size=4, data_world=2).load_state_dict(state)


def test_other_data_and_another_seed_are_refused(corpus, stream):
    state = _state_after(attached(corpus, batch_size=4), 3)
    with pytest.raises(ValueError, match="seed is 5, was 0"):
        attached(corpus, step=3, batch_size=4, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="fingerprint is .*, was "):
        attached(stream, step=3, batch_size=4).load_state_dict(state)


def _state_after(data: TextDataModule, step: int) -> dict:
    steps(data, step)
    data.trainer.global_step = step
    return data.state_dict()


def test_processes_of_one_group_read_the_same_rows(corpus):
    def of_rank(rank: int, **options) -> list[torch.Tensor]:
        data = attached(corpus, rank, batch_size=2, data_world=2, **options)
        data.trainer.world_size = 4
        return steps(data, 3)

    first, second, third, fourth = (of_rank(rank) for rank in range(4))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, third, fourth))
    assert not any(map(torch.equal, first, third))
    assert all(map(torch.equal, third, of_rank(0, data_rank=1)))


@pytest.mark.parametrize("kind", ["corpus", "stream"])
def test_a_worker_does_not_change_the_batches(kind, request):
    corpus = request.getfixturevalue(kind)
    alone = steps(attached(corpus, batch_size=2), 6)
    assert all(map(torch.equal, alone, steps(attached(corpus, batch_size=2, num_workers=2), 6)))


def test_the_wait_for_batches_is_measured(corpus, monkeypatch):
    data = attached(corpus, batch_size=2)
    assert data.take_wait() == 0.0
    row = type(corpus.train).__getitem__
    monkeypatch.setattr(type(corpus.train), "__getitem__", lambda *a: (time.sleep(0.01), row(*a))[1])
    for _ in islice(data.train_dataloader(), 3):
        time.sleep(0.05)
    waited = data.take_wait()
    assert 0.06 <= waited < 0.15
    assert data.take_wait() == 0.0


def test_the_rows_of_a_mixtures_parts_are_counted(corpus_path):
    parts = [{"source": "stdlib", "weight": 0.75}, {"source": "copy", "weight": 0.25}]
    mixed = build_corpus(
        "mixture", mixture=parts, path=str(corpus_path), context_length=CONTEXT, validation_fraction=0.3
    )
    data = attached(mixed, batch_size=5, accumulate=2)
    assert data.part_rows(0) == {"stdlib": 0, "copy": 0}
    assert data.part_rows(100) == {"stdlib": 750, "copy": 250}
    copied = sum(b"Copy" in mixed.tokenizer.decode(row.numpy()) for batch in steps(data, 10) for row in batch)
    assert data.part_rows(10) == {"stdlib": 100 - copied, "copy": copied}
    assert attached(mixed, batch_size=5, overfit_batches=1).part_rows(3) == {}


def test_a_stream_has_no_batches_to_overfit(stream):
    with pytest.raises(ValueError, match="overfit_batches=1: a stream has no first batches"):
        TextDataModule(stream, batch_size=1, overfit_batches=1)
