#!/usr/bin/env bash
# Runs random cases against the oracle on this machine's GPUs, then 10,000 operations in which ranks are late at random.
# Adds the result to benchmarks/results/, as the step soak.
#
#   scripts/gpu_soak.sh                           # ten minutes
#   scripts/gpu_soak.sh --minutes 5 --seed 5000   # options go to tests/soak.py; `--seed N --cases 1` repeats a case
#
# Uses the environment of $PYTHON (python3), where jax_ep is installed (scripts/gpu_check.sh build).
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
logs=$(realpath -m "${GPU_CHECK_LOGS:-build/gpu_check}")
mkdir -p "$logs"
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1          # NVLink multicast is not used
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}  # leave room for arenas
rm -f "$logs"/soak.*
# Runs the file, not the module: `python -m` would import this checkout's jax_ep/, which has no compiled kernels.
"$python" tests/soak.py --backend cuda --minutes 10 --late-operations 10000 --json "$logs/soak.json" "$@" 2>&1 |
  tee "$logs/soak.log"
status=${PIPESTATUS[0]}
echo "$status $SECONDS" >"$logs/soak.status"
"$python" scripts/gpu_report.py "$logs" soak || status=1
exit "$status"
