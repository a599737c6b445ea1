"""Writes the weights of a checkpoint, sharded or not, to one safetensors file.

python scripts/export_checkpoint.py runs/NAME/checkpoints/step-00000300 weights.safetensors

A finished run has its weights in runs/NAME/model already, as a Hugging Face directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longnet.config.arguments import script
from longnet.parallel.checkpoints import export_weights


@script
def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a directory, runs/NAME/checkpoints/step-...")
    parser.add_argument("target", type=Path, help="the safetensors file to write")
    options = parser.parse_args(words)
    export_weights(options.checkpoint, options.target)


if __name__ == "__main__":
    main()
