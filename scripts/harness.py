"""lm-eval on a checkpoint by its directory: its own command line, with --model longnet for ours and as the default.

    python scripts/harness.py --model_args pretrained=runs/NAME/model,max_length=8192 --tasks niah_single_1,ruler_vt
    python scripts/harness.py --model_args pretrained=DIR --tasks my_task --include_path my_tasks --output_path results

max_length is the longest prompt and answer together, the model's context by default; what is longer is refused, where
--model hf would cut it on the left. All other options are the harness's: --help shows them.
"""

from __future__ import annotations

import sys

from longnet.config.arguments import script


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    try:
        # Registers the model's name.
        import longnet.evaluation.harness  # noqa: F401
    except ImportError as error:
        raise ValueError(f"lm-eval is needed ({error}); pip install 'longnet[evaluation]'") from error
    from lm_eval.__main__ import cli_evaluate

    if not any(word in ("ls", "validate") or word.split("=")[0] in ("--model", "-M", "--config") for word in words):
        sys.argv += ["--model", "longnet"]
    cli_evaluate()


if __name__ == "__main__":
    main()
