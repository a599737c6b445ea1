"""The decoder: a transformers model whose attention is chosen by config.

Importing this package makes transformers' Auto classes know the model type ``longnet``, and every decoder of
transformers the attention implementation ``longnet``.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .cache import LongNetCache
from .config import LongNetConfig
from .decoder import LongNetForCausalLM, LongNetModel
from .hf import interface as _interface  # noqa: F401 - registers itself
from .reading import read, read_stream

__all__ = ["LongNetCache", "LongNetConfig", "LongNetForCausalLM", "LongNetModel", "read", "read_stream"]

AutoConfig.register("longnet", LongNetConfig, exist_ok=True)
AutoModelForCausalLM.register(LongNetConfig, LongNetForCausalLM, exist_ok=True)
