"""Hugging Face datasets, by a name on the hub or by a local path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longnet.data.documents import Document, SourceSpec, Split
from longnet.data.records import record_text


def hf(spec: SourceSpec) -> Iterator[Document]:
    """Yield the rows of a dataset: one split by the rule, or one for training and another for validation.

    Raises:
        ValueError: If the dataset, its split or its field is not there.
    """
    sides: list[tuple[str, Split | None]] = [(spec.split, None)]
    if spec.validation_split is not None:
        # Validation first, so that a stream that never ends still has one.
        sides = [(spec.validation_split, "validation"), (spec.split, "train")]
    for split, side in sides:
        dataset = load(spec, split)
        names = dataset.column_names or list(next(iter(dataset)))
        if spec.text_field not in names:
            raise ValueError(
                f"text_field={spec.text_field!r} is not a field of {spec.path}; there are {', '.join(names)}"
            )
        for number, row in enumerate(dataset):
            document_id = f"{split}:{number}"
            if content := record_text(spec, f"{spec.path}, {document_id}", row[spec.text_field]):
                yield Document(document_id, content, side or spec.side(document_id))


def load(spec: SourceSpec, split: str) -> Any:
    """One split of the dataset, with every row in its order."""
    import datasets

    if spec.path is None:
        raise ValueError("path=None: source=hf needs a dataset's name on the hub, or a directory; set path")
    on_disk = any(Path(spec.path, name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not on_disk:
            return datasets.load_dataset(
                spec.path, spec.subset, split=split, streaming=spec.streaming, revision=spec.revision
            )
        saved: Any = datasets.load_from_disk(spec.path)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(
            f"path={spec.path!r}: the dataset cannot be loaded ({type(error).__name__}: {first}); expected a name "
            "on the hub, with a network, or a directory of data files"
        ) from None
    if not isinstance(saved, datasets.DatasetDict):
        if spec.validation_split is not None:
            raise ValueError(
                f"validation_split={spec.validation_split!r}: {spec.path} is one dataset without splits; expected "
                "null, which keeps documents of it back by validation_fraction, or a directory with both splits"
            )
        saved = {SourceSpec.split: saved, str(saved.split or SourceSpec.split): saved}
    if split not in saved:
        raise ValueError(f"split={split!r} is not in {spec.path}; there are {', '.join(saved)}")
    return saved[split].to_iterable_dataset() if spec.streaming else saved[split]
