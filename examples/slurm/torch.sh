#!/usr/bin/env bash
# sbatch examples/slurm/torch.sh --backup /shared/folder
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --requeue
#SBATCH --open-mode=append
export KERAS_BACKEND=torch
# Only the processes of this job can join it.
export KERAS_TP_SECRET=$(openssl rand -hex 16)
# If a process ends with an error, SLURM ends the others.
srun --kill-on-bad-exit=1 python examples/engines/train.py "$@"
