"""The decoder: a transformers model whose attention is chosen by config.

Importing this package makes transformers' Auto classes know the model type ``longnet``.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .config import LongNetConfig
from .decoder import LongNetForCausalLM, LongNetModel

__all__ = ["LongNetConfig", "LongNetForCausalLM", "LongNetModel"]

AutoConfig.register("longnet", LongNetConfig, exist_ok=True)
AutoModelForCausalLM.register(LongNetConfig, LongNetForCausalLM, exist_ok=True)
