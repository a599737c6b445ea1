"""LongNet: training long-context language models with exact dilated attention."""

from longnet.registration import register

__version__ = "0.1.0"

register()
