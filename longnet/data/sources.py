"""The sources by the name that `data.source` gives them."""

from __future__ import annotations

from longnet.data.documents import Source
from longnet.data.stdlib import stdlib

SOURCES: dict[str, Source] = {"stdlib": stdlib}
