"""Puts runs side by side on one page: curves, evaluations, patterns, speed, samples, and where their configs differ.

    python scripts/report.py runs/a runs/b
    python scripts/report.py runs/*/ --out report.html

The page is one HTML file with everything in it: it can be opened without a network, and sent to someone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longnet.config.arguments import script


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the file to write")
    arguments = parser.parse_args(words)

    from longnet.evaluation.report import write_report

    write_report(arguments.runs, arguments.out)
    print(f"{len(arguments.runs)} runs: {arguments.out}")


if __name__ == "__main__":
    main()
