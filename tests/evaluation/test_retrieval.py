"""Scores of answers, against plain forward passes and transformers' own generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from longnet.data import ByteTokenizer, Sample, build_sample
from longnet.evaluation import retrieval
from longnet.evaluation.retrieval import awkward_places, placement_sweep, retrieval_grid, score_samples
from longnet.model import LongNetForCausalLM
from tests.model.models import HYBRID, small_model

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model():
    return small_model(vocab_size=384, attention=HYBRID, num_hidden_layers=3)


def samples(task="passkey", length=300, count=4):
    return [build_sample(task, BYTES, length, seed=1, index=i, depth=0.5) for i in range(count)]


def answer_loss(model, sample, answer):
    ids = torch.from_numpy(np.concatenate([[1], sample.prompt, answer]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, -len(answer) :]
    right = (logits.argmax(-1) == ids[0, -len(answer) :]).sum().item()
    return cross_entropy(logits, ids[0, -len(answer) :]).item(), right


@pytest.mark.parametrize("batch_tokens", [50, 2000])
@pytest.mark.parametrize("task", ["passkey", "multi_hop", "recall", "lookup"])
def test_likelihoods_are_those_of_the_whole_text(model, task, batch_tokens):
    made = samples(task, 420)
    scores = score_samples(model, BYTES, made, batch_tokens=batch_tokens)
    answers = [sample.ids[sample.answer_start :] for sample in made]
    for sample, own, score in zip(made, answers, scores, strict=True):
        expected, right = answer_loss(model, sample, own)
        assert score.losses / score.tokens == pytest.approx(expected, rel=1e-4)
        assert (score.tokens, score.right) == (1 if task == "lookup" else 6, right)
        wrong = [[rival] for rival in sample.rivals] or [x for x in answers if not np.array_equal(x, own)]
        rivals = [answer_loss(model, sample, other)[0] for other in wrong]
        assert score.preferred == (expected < min(rivals))


class Parrot(LongNetForCausalLM):
    """Says what it is told to: each token is followed by the one that `after` names."""

    def __init__(self, after: dict[int, int]) -> None:
        super().__init__(small_model(vocab_size=384).config)
        size = self.config.hidden_size
        torch.manual_seed(0)
        with torch.no_grad():
            for layer in self.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            codes = torch.nn.functional.normalize(torch.randn(384, size), dim=1)
            self.lm_head.weight = torch.nn.Parameter(torch.zeros(384, size))
            self.model.embed_tokens.weight.copy_(codes)
            for token, following in after.items():
                self.lm_head.weight[following] = 10 * codes[token]
        self.eval()


@pytest.mark.parametrize(("strength", "preferred"), [(5, False), (20, True)])
def test_knowing_the_kind_of_an_answer_is_not_preferring_it(strength, preferred):
    made = samples("lookup")
    kind, answer = made[0].ids[-2:].tolist()
    parrot = Parrot({kind: made[0].rivals[0]})
    with torch.no_grad():
        # Likelier than any answer of the others in both cases.
        parrot.lm_head.weight[answer] = strength * parrot.model.embed_tokens.weight[kind]
    assert score_samples(parrot, BYTES, made, batch_tokens=2000)[0].preferred == preferred


def test_what_is_generated_is_told_from_what_is_not():
    made = samples(count=1)[0]
    answer = made.ids[made.answer_start :].tolist()
    prompt = made.prompt.tolist()
    chain = dict(zip([prompt[-1], *answer], answer, strict=False))
    if len(set(answer)) < len(answer):
        pytest.fail("the answer repeats a digit: choose another sample")
    (score,) = score_samples(Parrot(chain), BYTES, [made], batch_tokens=1000)
    assert (score.generated, score.right, score.preferred) == (True, 6, None)
    chain[answer[-2]] = 3
    (score,) = score_samples(Parrot(chain), BYTES, [made], batch_tokens=1000)
    assert (score.generated, score.right) == (False, 5)


def test_generation_is_transformers_own(model):
    """Answers are generated if the model says them by itself, not with another last token, whatever the others are."""
    draw, made, said_first = np.random.default_rng(0), [], set()
    lengths, wanted = (6, 1, 3, 6, 2), [True, True, False, False, True]
    for length, right in zip(lengths, wanted, strict=True):
        prompt = draw.integers(3, 384, 40)
        ids = torch.from_numpy(np.concatenate([[1], prompt]))[None]
        said = model.generate(ids, max_new_tokens=length, min_new_tokens=length)[0, ids.shape[1] :].numpy()
        said_first.add(int(said[0]))
        said[-1] = said[-1] if right else (said[-1] + 1) % 384
        made.append(Sample(np.concatenate([prompt, said]), len(prompt), "", 0.5))
    assert len(said_first) == len(made)
    for batch_tokens in (41, 1000):
        assert [score.generated for score in score_samples(model, BYTES, made, batch_tokens=batch_tokens)] == wanted


def test_the_grid_has_a_row_a_cell(model):
    read = []
    rows = retrieval_grid(
        model, BYTES, ["passkey", "copy"], [300, 200], [0.0, 1.0], samples=3, batch_tokens=500, advance=read.append
    )
    cells = [(row.task, row.length, row.depth) for row in rows]
    assert cells == [
        *(("passkey", length, depth) for length in (200, 300) for depth in (0.0, 1.0)),
        ("copy", 200, 0.0),
        ("copy", 300, 0.0),
    ]
    for row in rows:
        assert row.samples == 3
        assert 0 <= row.tokens_right <= 1
        assert row.generated_low <= row.generated <= row.generated_high
        assert row.loss_low < row.loss < row.loss_high
        # Answers as long as half the text are not compared with others.
        assert (row.preferred != row.preferred) == (row.task == "copy")
    assert 0.7 * 3 * 1500 < sum(read) <= 3 * 1500


def test_awkward_places_are_the_patterns_own():
    config = small_model(attention=[{"name": "dilated", "segment_lengths": [64, 256], "dilation_rates": [1, 4]}]).config
    places = awkward_places(config, 600)
    by_name = {name: [(o, p) for n, o, p in places if n == name] for name, *_ in places}
    assert set(by_name) == {"border of 64", "border of 256", "phase of 4"}
    assert all((position - offset) % 256 == 0 for offset, position in by_name["border of 256"])
    assert {position % 4 for _, position in by_name["phase of 4"]} == {0, 1, 2, 3}
    shifted = {"name": "dilated", "segment_lengths": [64, 256], "dilation_rates": [1, 4], "shift": 32}
    moved = awkward_places(small_model(attention=[shifted]).config, 600)
    assert all((position - offset + 32) % 64 == 0 for name, offset, position in moved if name == "border of 64")
    assert awkward_places(small_model(attention=["dense"]).config, 600) == []


def test_needles_lie_where_the_sweep_says(model, monkeypatch):
    seen = []
    original = retrieval.build_sample

    def spy(*args, **options):
        seen.append(original(*args, **options))
        return seen[-1]

    monkeypatch.setattr(retrieval, "build_sample", spy)
    rows = placement_sweep(model, BYTES, 300, samples=2, batch_tokens=1000)
    assert {row.place for row in rows} >= {"border of 8", "border of 32", "phase of 2"}
    # An eos stands before the sample: its token number p - 1 is at position p.
    assert [sample.needle_start + 1 for sample in seen[::2]] == [row.position for row in rows]
    # The questions of a place are in both phases.
    assert [len(sample.ids) for sample in seen] == [299, 298] * len(rows)
    assert all(0 <= row.preferred_low <= row.preferred <= row.preferred_high <= 1 for row in rows)


def test_a_place_where_nothing_was_compared_prefers_nothing_and_rejects_nothing(model):
    # The answer of a single sample has no others beside it.
    rows = placement_sweep(model, BYTES, 300, samples=1, batch_tokens=1000)
    assert all(np.isnan([row.preferred, row.preferred_low, row.preferred_high]).all() for row in rows)


def test_a_model_that_gives_no_numbers_prefers_nothing():
    broken = small_model(vocab_size=384)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    for score in score_samples(broken, BYTES, samples(), batch_tokens=2000):
        assert (score.preferred, score.generated) == (False, False)
