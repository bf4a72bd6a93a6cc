#!/usr/bin/env bash
# Transfers between the hosts of a Slurm cluster, one rank a host; see benchmarks/cluster.py.
#
#   sbatch --nodes 4 benchmarks/slurm.sh [options of python -m benchmarks.cluster]
#
#   PYTHON              an interpreter that has gymfast on all hosts (python3)
#   GYMFAST_NCCL_TESTS  the folder of nccl-tests' binaries, to have them beside
#
# Never run on a cluster so far.
#SBATCH --ntasks-per-node=1 --exclusive --time=00:30:00 --job-name=gymfast-transfer
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
GYMFAST_KEY=$("${PYTHON:-python3}" -c 'import secrets; print(secrets.token_hex(32))')
export MASTER_ADDR GYMFAST_KEY
exec srun --ntasks-per-node=1 "${PYTHON:-python3}" -m benchmarks.cluster "$@"
