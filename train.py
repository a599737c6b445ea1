"""Trains a LongNet, a decoder with dilated attention for long contexts.

Commands:
    python train.py                                         the default job: minutes on a CPU
    python train.py experiment=stdlib_gpu                   a whole other job, from conf/experiment
    python train.py attention=dense trainer.max_steps=100   an option of a group, a value of a key
    python train.py run.name=NAME resume=auto               goes on with a run; or resume=never, resume=PATH
    python train.py -m attention=dense,dilated              a sweep; its runs are compared at the end
    python train.py debug=default                           a few steps, to find a fault
    python train.py --cfg job                               shows every key of the job; --resolve its values
    torchrun --nproc-per-node 2 train.py strategy=ddp       several processes; sequence_parallel: one sequence over them

A run lies in <run.root>/<run.name>: its config, metrics.csv, checkpoints, plots. Hydra's own flags: --hydra-help.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig

from longnet.config import load
from longnet.config.cli import check_command_line, reports_user_errors

CONF = Path(__file__).parent / "conf"


@hydra.main(config_path="conf", config_name="train", version_base="1.3")
@reports_user_errors
def main(cfg: DictConfig) -> None:
    """Runs one job."""
    job = load(cfg)

    # torch, lightning and transformers take seconds to import: only for a job that can run.
    from longnet.training.run import train

    train(job)


if __name__ == "__main__":
    check_command_line(CONF, "train", about=__doc__)
    main()
