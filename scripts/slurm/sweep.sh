#!/usr/bin/env bash
# A sweep as SLURM jobs, one a run, all at once: Hydra's submitit launcher sends them and waits for them.
#   pip install -e '.[slurm]'
#   scripts/slurm/sweep.sh experiment=context_study hydra.launcher.partition=gpu
# What -m varies is the experiment's own, or given: attention=dense,dilated optim.lr=1e-3,3e-3
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python train.py -m hydra/launcher=submitit_slurm \
    hydra.launcher.gpus_per_node=1 hydra.launcher.cpus_per_task=8 hydra.launcher.timeout_min=240 \
    "$@"
