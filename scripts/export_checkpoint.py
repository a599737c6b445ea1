"""Writes the weights of a checkpoint, sharded or not, to one safetensors file.

python scripts/export_checkpoint.py runs/NAME/checkpoints/last.ckpt weights.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longnet.parallel.checkpoints import export_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a file, or a directory that several processes wrote")
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    if not options.checkpoint.exists():
        parser.error(f"{options.checkpoint} does not exist; expected one of a run's checkpoints")
    export_weights(options.checkpoint, options.target)


if __name__ == "__main__":
    main()
