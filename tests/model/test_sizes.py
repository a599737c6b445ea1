"""Parameter counts of the sizes in conf/, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from longnet.model import LongNetConfig, LongNetForCausalLM

CONF = Path(__file__).resolve().parents[2] / "conf"
GPT2_VOCABULARY = 50257

# C hidden, F intermediate, V vocabulary, all with a tied embedding V C.
COUNTS = {
    # V = 384. A layer: 4 C^2 + 3 C F + 2 C = 65,536 + 147,456 + 256 = 213,248. 4 layers + C + V C.
    "tiny": (384, 902_272),
    # A layer: 4 C^2 + 2 C F + 2 C = 2,359,296 + 4,718,592 + 1,536 = 7,079,424. 12 layers + C + V C.
    "125m": (GPT2_VOCABULARY, 123_551_232),
    # As 125m, with biases 4 C + F + C = 6,912 and layer norms 2 C + 2 C + 2 C + 2 F = 10,752 instead of 2 C.
    "paper_125m": (GPT2_VOCABULARY, 123_745_536),
    # A layer: 4,194,304 + 8,388,608 + 2,048 = 12,584,960. 24 layers + C + V C.
    "350m": (GPT2_VOCABULARY, 353_503_232),
    # What Llama-3.2-1B has. A layer: 2 C^2 + 2 C (8 * 64) + 3 C F + 2 C = 60,821,504. 16 layers + C + 128,256 C.
    "1b": (None, 1_235_814_400),
    # A layer: 26,214,400 + 52,428,800 + 5,120 = 78,648,320. 32 layers + C + V C.
    "2_7b": (GPT2_VOCABULARY, 2_645_406_720),
}


def model_section(size: str) -> dict[str, object]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [f"model={size}"])
    section = OmegaConf.to_container(cfg.model)
    assert isinstance(section, dict)
    return section


def test_every_size_is_counted() -> None:
    # Those that begin from a checkpoint have its size.
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == set(COUNTS) | {"pretrained", "hf"}


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_count(size: str) -> None:
    vocab_size, expected = COUNTS[size]
    section = model_section(size)
    if vocab_size is not None:
        assert section["vocab_size"] is None
        section["vocab_size"] = vocab_size
    with torch.device("meta"):
        model = LongNetForCausalLM(LongNetConfig(**section, max_position_embeddings=8192))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
