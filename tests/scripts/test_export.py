"""`scripts/export_checkpoint.py` from end to end."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longnet.checkpoint import Facts, Writer, path_of

ROOT = Path(__file__).parents[2]
EMBEDDING = torch.randn(7, 4)


def save(run: Path, **weights: torch.Tensor) -> Path:
    path = path_of(run / "checkpoints", 3)
    state = {f"model.{name.replace('__', '.')}": weight for name, weight in weights.items()}
    Writer(path, {"state_dict": state, "global_step": 3}, Facts(3)).write()
    return path


@pytest.fixture
def export(monkeypatch, capsys, tmp_path):
    """Calls the script: its exit code, and what it said of an error."""

    def call(checkpoint: Path, target: Path = tmp_path / "weights.safetensors") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["export_checkpoint.py", str(checkpoint), str(target)])
        try:
            runpy.run_path(str(ROOT / "scripts/export_checkpoint.py"), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        return 0, ""

    return call


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"model__embed_tokens__weight": EMBEDDING, "lm_head__weight": EMBEDDING}, {"model.embed_tokens.weight"}),
        (
            {"model__embed_tokens__weight": EMBEDDING, "lm_head__weight": EMBEDDING + 1},
            {"model.embed_tokens.weight", "lm_head.weight"},
        ),
        ({"transformer__wte__weight": EMBEDDING, "lm_head__weight": EMBEDDING}, {"transformer.wte.weight"}),
        ({"transformer__wte__weight": EMBEDDING, "lm_head__weight": EMBEDDING + 1},
         {"transformer.wte.weight", "lm_head.weight"}),
    ],
    ids=["tied", "apart", "tied, other names", "apart, other names"],
)  # fmt: skip
def test_the_weights_are_written_by_the_models_names(export, tmp_path, weights, expected):
    assert export(save(tmp_path / "run", **weights)) == (0, "")
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == expected
    assert all(torch.equal(found[name.replace("__", ".")], x) for name, x in weights.items()
               if name.replace("__", ".") in expected)  # fmt: skip


def test_a_changed_byte_is_not_exported(export, tmp_path):
    path = save(tmp_path / "run", model__embed_tokens__weight=EMBEDDING)
    file = path / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    code, said = export(path)
    assert code == 1
    assert f"{file} has other content than was saved" in said
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_directory_that_is_no_checkpoint_is_answered_in_one_line(export, tmp_path):
    path = save(tmp_path / "run", model__embed_tokens__weight=EMBEDDING)
    for wrong in (tmp_path / "run", tmp_path / "run/checkpoints", tmp_path / "nowhere"):
        code, said = export(wrong)
        assert code == 1
        assert "is no checkpoint of a run" in said
        assert "Traceback" not in said
        assert (f"for example {path}" in said) == (wrong.name != "nowhere")
    code, said = export(path, tmp_path / "absent/weights.safetensors")
    assert code == 1
    assert f"target={tmp_path}/absent/weights.safetensors: there is no directory {tmp_path}/absent" in said


def test_adapters_are_not_written_unmerged(export, tmp_path):
    run = tmp_path / "run"
    layer = {"q_proj__base_layer__weight": EMBEDDING, "q_proj__lora_A__default__weight": EMBEDDING}
    code, said = export(save(run, **layer))
    assert code == 1
    assert str(run / "model") in said
    assert str(run / "adapter") in said
    assert not (tmp_path / "weights.safetensors").exists()
