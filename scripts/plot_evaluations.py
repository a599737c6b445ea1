"""Draws what `scripts/evaluate.py` or a training's own evaluation found, several models in one picture.

    python scripts/plot_evaluations.py runs/a runs/b --out compared.png
    python scripts/plot_evaluations.py results/before results/after --labels before after

A directory is a run's, whose latest evaluation is taken, or one that `evaluate.py` has written to. There is a panel for
perplexity by window, one for perplexity by position, and one for each task by distance; bands are 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longnet.config.arguments import script
from longnet.config.errors import ConfigError


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, help="directories of runs or of results")
    parser.add_argument("--labels", nargs="+", help="their names; by default what tells the directories apart")
    parser.add_argument("--out", type=Path, default=Path("evaluations.png"), help="the file to write")
    arguments = parser.parse_args(words)

    from longnet.evaluation.compare import distinct_labels
    from longnet.evaluation.figures import draw_evaluations
    from longnet.evaluation.report import latest_evaluation

    labels = arguments.labels or distinct_labels(arguments.directories)
    if len(labels) != len(arguments.directories):
        parser.error(f"--labels has {len(labels)} names for {len(arguments.directories)} directories")
    if arguments.labels and len(set(labels)) < len(labels):
        parser.error(f"--labels {' '.join(labels)}: expected a name of its own for each directory")
    found = [latest_evaluation(place) or latest_evaluation(place / "evaluation") for place in arguments.directories]
    if missing := [place for place, results in zip(arguments.directories, found, strict=True) if results is None]:
        expected = "expected a run that was evaluated, or what evaluate.py was given as out"
        raise ConfigError([f"{place}: no results.json; {expected}" for place in missing])
    evaluations = {label: results for label, results in zip(labels, found, strict=True) if results}
    draw_evaluations(evaluations, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
