"""The way to and from the Hugging Face world: checkpoints in, checkpoints out, and the operator in other models."""

from .convert import export_checkpoint, import_checkpoint, is_dense_equivalent, load_checkpoint, read_config
from .families import FAMILIES
from .interface import set_pattern

__all__ = [
    "FAMILIES",
    "export_checkpoint",
    "import_checkpoint",
    "is_dense_equivalent",
    "load_checkpoint",
    "read_config",
    "set_pattern",
]
