"""LongNet: training long-context language models with exact dilated attention."""

__version__ = "0.1.0"
