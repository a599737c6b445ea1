"""Keeps the libraries' small talk out of the output, so that what is left on the screen is worth reading."""

from __future__ import annotations

import logging
import os
import warnings

import transformers

_NOISE = (
    # Rows are made in memory in microseconds: workers would only cost start-up time.
    r".*does not have many workers.*",
    # The metrics are sums over all processes already.
    r".*It is recommended to use `self\.log\('val/.*sync_dist=True.*",
    r".*isn't allowed when using manual optimization.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*treespec.*LeafSpec.*deprecated.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    # Calling the compiled layers under no_grad for validation is meant.
    r".*Online softmax is disabled on the fly.*",
)


def quiet_libraries() -> None:
    """Turns off tips, banners and warnings that ask nothing of the person who reads them; errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
