"""Writes docs/configuration.md, the reference of all keys, from the schema and the comments in conf/.

python scripts/document_config.py            # or: make docs
"""

from __future__ import annotations

from pathlib import Path

from longnet.config.reference import build_reference

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs the command."""
    page = ROOT / "docs/configuration.md"
    page.write_text(build_reference(ROOT / "conf"))
    print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
