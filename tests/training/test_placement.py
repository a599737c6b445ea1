from __future__ import annotations

import pytest
import torch

from longnet.config.schema import TrainerConfig
from longnet.training.placement import place


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def gpus(monkeypatch, number: int, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")


def test_auto_on_a_cpu(no_gpu):
    placement = place(TrainerConfig())
    assert (placement.accelerator, placement.precision, placement.compile) == ("cpu", "32-true", False)


def test_auto_on_a_gpu(monkeypatch):
    gpus(monkeypatch, 1)
    placement = place(TrainerConfig())
    assert (placement.accelerator, placement.precision, placement.compile) == ("cuda", "bf16-mixed", True)
    assert placement.matmul_dtype == torch.bfloat16


def test_auto_on_a_gpu_without_bf16(monkeypatch):
    gpus(monkeypatch, 1, bf16=False)
    assert place(TrainerConfig()).precision == "16-mixed"
    with pytest.raises(ValueError, match="precision=bf16: an old GPU has no bfloat16; use fp16 or fp32"):
        place(TrainerConfig(precision="bf16"))


def test_what_is_asked_for_is_taken(no_gpu):
    placement = place(TrainerConfig(accelerator="cpu", precision="bf16", compile="on"))
    assert (placement.precision, placement.precision_name, placement.compile) == ("bf16-mixed", "bf16", True)


def test_no_gpu_where_one_was_asked_for(no_gpu):
    with pytest.raises(ValueError, match="accelerator=gpu: no GPU here .*; set trainer.accelerator=cpu or auto"):
        place(TrainerConfig(accelerator="gpu"))


def test_more_gpus_than_there_are(monkeypatch):
    gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"devices=4: this machine has 2 GPU\(s\); set trainer.devices=2"):
        place(TrainerConfig(accelerator="gpu", devices=4))
