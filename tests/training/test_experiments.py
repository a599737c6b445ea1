"""Every experiment of conf/ takes a step on a CPU, at a size that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from longnet.config import load
from longnet.training.metrics import read_metrics
from longnet.training.run import train
from tests.model.hf.originals import original

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
ATTENTION = sorted(path.stem for path in (CONF / "attention").glob("*.yaml"))

SHRUNKEN = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": "null",
    "model.head_dim": "null",
    "data.context_length": 256,
    "data.batch_size": 1,
    "trainer.accelerator": "cpu",
    "trainer.precision": "fp32",
    "callbacks": "quiet",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one in the place of the weights that an experiment would fetch."""
    path = tmp_path_factory.mktemp("checkpoints") / "llama"
    original("smollm2", vocab_size=384).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "override", [f"experiment={name}" for name in EXPERIMENTS] + [f"attention={name}" for name in ATTENTION]
)
def test_it_takes_a_step(override, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    overrides = [override, "debug=fast_dev", f"run.root={tmp_path}", *(f"{k}={v}" for k, v in SHRUNKEN.items())]
    if "finetune" in override:
        overrides = [item for item in overrides if not item.startswith("model.")]
        overrides += [f"model.pretrained={checkpoint}", "data.tokenizer=bytes", "finetune.context_growth=[[128,0.5]]"]
        overrides += ["attention.dilated.base=64"]
    if "context_study" in override:
        overrides += ["finetune.context_growth=[[128,0.5]]"]
    if "recall_study" in override:
        overrides += ["data.sample_lengths=[256]"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        job = load(cfg)
    train(job)
    (row,) = read_metrics(tmp_path / job.run.name / "metrics.csv")
    assert row["step"] == 1
    assert row["val/bits_per_byte"] > 0
    assert json.loads((tmp_path / job.run.name / "model/config.json").read_text())["model_type"] == "longnet"
