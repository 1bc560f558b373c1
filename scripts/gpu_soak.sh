#!/usr/bin/env bash
# Random cases against the oracle on this machine's GPUs, then 10,000 operations on ranks that are late at random; writes
# benchmarks/results/gpu_soak-*.json.
#
#   scripts/gpu_soak.sh                           # ten minutes
#   scripts/gpu_soak.sh --minutes 5 --seed 5000   # options go to tests/soak.py, and `--seed N --cases 1` repeats a case
#
# Uses the environment of $PYTHON (python3), in which jax_ep is installed (scripts/gpu_check.sh build).
set -eu
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1          # NVLink multicast is not used
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}  # leave room for arenas
# Run as a file, so that this folder's jax_ep, which has no native extensions, does not hide the installed one.
exec "${PYTHON:-python3}" tests/soak.py --backend cuda --minutes 10 --late-operations 10000 \
  --json "benchmarks/results/gpu_soak-$(date -u +%Y%m%dT%H%M%S).json" "$@"
