from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict

from longnet.data.documents import SourceSpec
from longnet.data.hub import hf


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    train = Dataset.from_dict({"body": [f"text {n}" for n in range(30)], "n": list(range(30))})
    held = Dataset.from_dict({"body": ["held one", "held two"], "n": [0, 1]})
    train.save_to_disk(root / "saved")
    DatasetDict(train=train, validation=held).save_to_disk(root / "dict")
    (root / "files").mkdir()
    train.to_parquet(root / "files" / "train.parquet")
    return root


def read(path, **options) -> list[tuple[str, bytes, str]]:
    spec = SourceSpec("hf", str(path), text_field="body", **options)
    return [(document.id, document.content, document.split) for document in hf(spec)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["saved", "files"])
def test_a_split_by_the_rule(places, kind, streaming, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    documents = read(places / kind, streaming=streaming, validation_every=7)
    assert [content for _, content, _ in documents] == [f"text {n}".encode() for n in range(30)]
    assert {name for name, _, side in documents if side == "validation"} == {f"train:{n}" for n in range(0, 30, 7)}


def test_a_split_of_its_own_for_validation(places):
    documents = read(places / "dict", validation_split="validation")
    assert [content for _, content, side in documents if side == "validation"] == [b"held one", b"held two"]
    assert len([1 for *_, side in documents if side == "train"]) == 30


def test_what_is_not_there_is_named_with_what_is(places):
    with pytest.raises(ValueError, match="text_field='text' is not a field of .*; there are body, n"):
        list(hf(SourceSpec("hf", str(places / "saved"))))
    with pytest.raises(ValueError, match="split='test' is not in .*; there are train, validation"):
        read(places / "dict", split="test")
    with pytest.raises(ValueError, match="the dataset cannot be loaded"):
        read(places / "absent")
    with pytest.raises(ValueError, match="needs a dataset's name"):
        list(hf(SourceSpec("hf")))


def test_a_dataset_without_splits_is_never_both_sides(places):
    with pytest.raises(ValueError, match="validation_split='validation': .*saved is one dataset without splits"):
        read(places / "saved", validation_split="validation")
    with pytest.raises(ValueError, match="split='nonsense' is not in .*saved; there are train"):
        read(places / "saved", split="nonsense")
    held = Dataset.from_dict({"body": ["held one"]}, split="held")
    held.save_to_disk(places / "held")
    assert len(read(places / "held", split="held")) == len(read(places / "held")) == 1
    with pytest.raises(ValueError, match="validation_split='train' is the split to train on"):
        read(places / "dict", validation_split="train")
