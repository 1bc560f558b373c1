#!/usr/bin/env bash
# Builds jax_ep on a machine with GPUs, runs all that needs one, and writes benchmarks/results/gpu_check-*.json.
#
#   scripts/gpu_check.sh [build native sanitizer tests train processes bench layer overlap]    # no names: all steps
#   scripts/gpu_check.sh processes-2-nvlink bench-7-grad                                       # parts of them
#
# Takes every GPU it finds (CUDA_VISIBLE_DEVICES chooses), Hopper or newer, two or more and a power of two; native,
# sanitizer, tests-3 and processes-one-gpu use the first one only, and need no second one. Nothing is fetched: the environment of $PYTHON (python3) must hold what
# the extras cuda13 and test bring, without jax_ep itself; besides that
#
#   build       wants nvcc, CMake and Ninja on the PATH, pip, scikit-build-core and nanobind; where nvidia-nvshmem-cu13
#               is installed, it builds the network transport, too
#   native      wants nvcc, CMake and Ninja on the PATH
#   sanitizer   wants compute-sanitizer on the PATH, and what native has built
#   processes   wants nvidia-nvshmem-cu13 to have been there for build, in its parts over NVSHMEM
#
# spin is not needed: where it is missing, tests leaves out the model of the protocol, which CI checks. Nor is git, if
# JAX_EP_COMMIT names the commit.
#
# GPUS_PER_HOST is how many GPUs processes over NVSHMEM take for a host (half of them). PYTEST_ARGS goes to pytest ("-m
# gpu" leaves out what needs none; where only one part of tests has what it selects, name that part). tests-3 takes no
# PYTEST_ARGS: its tests have no marks, and all of them run. BENCH_ARGS goes to the bench. A part may take STEP_TIMEOUT
# (540) seconds. Logs are kept in GPU_CHECK_LOGS (build/gpu_check), and all steps that have run there are in the report.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python")
steps=${*:-build native sanitizer tests train processes bench layer overlap}
logs=$(realpath -m "${GPU_CHECK_LOGS:-build/gpu_check}")
mkdir -p "$logs"
# Runs Python in tests/. Here it would take this folder's jax_ep/, which has no native extensions.
installed="env -C tests $python"
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1          # NVLink multicast is not used
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}  # leave room for arenas
arguments='GPUS_PER_HOST|PYTEST_ARGS|PYTEST_ADDOPTS|BENCH_ARGS|STEP_TIMEOUT|CUDA_VISIBLE_DEVICES'
failed=0

# step NAME COMMAND...: runs a step if it was asked for. The report reads its log, and its status with what the
# environment sets for it, as steps of several calls, with different settings, may be in one report.
step() {
  local name=$1 begun=$SECONDS
  shift
  [[ " $steps " == *" ${name%%-*} "* || " $steps " == *" $name "* ]] || return 0
  rm -f "$logs/$name".*  # a former run's
  timeout "${STEP_TIMEOUT:-540}" "$@" >"$logs/$name.log" 2>&1
  local status=$?
  { echo "$status $((SECONDS - begun))"; env | grep -E "^($arguments)="; } >"$logs/$name.status"
  [ $status -eq 0 ] || { failed=1; tail -n 40 "$logs/$name.log"; }
  echo "gpu_check: $name: $([ $status -eq 0 ] && echo ok || echo "FAILED ($status)"), $((SECONDS - begun)) s"
}

build_native_tests() {
  cmake -S tests/native -B build/native-gpu -G Ninja -DJAX_EP_GPU_TESTS=ON && cmake --build build/native-gpu
}
export -f build_native_tests

step build "$python" -m pip install --no-build-isolation --no-deps --force-reinstall \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native -C cmake.define.JAX_EP_CUDA=ON .
step native-build bash -c build_native_tests
step native-run build/native-gpu/exchange_test
sanitizer() {  # sanitizer TOOL NUM_RANKS OPTION...
  step "sanitizer-$1" compute-sanitizer --tool "$1" "${@:3}" --error-exitcode 9 build/native-gpu/exchange_test "$2" quick
}
sanitizer memcheck 8
sanitizer racecheck 8
# Each warp has four barriers of its own (ring.cuh). With room for as many, synccheck is slow: so with two ranks only.
# (With more, teams have other sizes; the barriers are the same.)
sanitizer synccheck 2 --num-cuda-barriers 32768
# Parts 1 and 2 may run at the same time.
some_tests=(test_{all_to_all,bench,combine,cuda,dispatch,doctor,examples}.py)
run_tests() {  # run_tests NUMBER ARGUMENT...
  step "tests-$1" $installed -m pytest "${@:2}" -q -p no:cacheprovider --junit-xml="$logs/tests-$1.xml" \
    ${PYTEST_ARGS:-}
}
run_tests 1 "${some_tests[@]}"
run_tests 2 . "${some_tests[@]/#/--ignore=}" --ignore=test_dispatch_layout.py
# The CUDA kernel of dispatch_layout. Without a GPU or the CUDA extension, these tests would run other code and pass.
layout_tests() {
  $installed -c 'import jax; from jax_ep import _native; jax.devices("gpu"); assert _native.cuda, _native.cuda_reason()' &&
    $installed -m pytest test_dispatch_layout.py -q -p no:cacheprovider --junit-xml="$logs/tests-3.xml"
}
export -f layout_tests
export python installed logs
step tests-3 bash -c layout_tests
# In float32 throughout: in TF32, the backends' order of summation would soon be amplified. Then the loss curves of the
# two backends are compared.
for backend in cuda reference; do
  step "train-$backend" env JAX_DEFAULT_MATMUL_PRECISION=highest "$python" examples/train_moe.py \
    --backend=$backend --steps=300 --dtype=float32 --out="$logs/$backend"
done
step train-curves "$python" scripts/compare_training.py "$logs/cuda" "$logs/reference"
# With a process for each GPU: what is particular to that; then the contract's tests, over NVLink, and over NVSHMEM between
# two halves of the GPUs, for which nvidia-nvshmem-cu13 must be there; then what operations cost in these two ways.
step processes-1 $installed -m pytest test_multiprocess.py -m gpu -q -p no:cacheprovider
# Two processes share one GPU, in time slices: with each way to map memory. (Nothing here may use NCCL, which refuses two
# ranks on one GPU.)
on_one_gpu() {
  for sharing in descriptor ipc; do
    for program in layers_on_gpus groups_again_and_again; do
      echo "$program, memory shared by $sharing"
      JAX_EP_SAME_GPU=1 JAX_EP_SHARING=$sharing XLA_PYTHON_CLIENT_PREALLOCATE=false $installed -m jax_ep.launch \
        -n 2 --same-devices --timeout 240 "$python" test_multiprocess.py "$program" || return
    done
  done
}
export -f on_one_gpu
step processes-one-gpu bash -c on_one_gpu
if [[ " $steps " == *" processes-"[2-5]* || " $steps " == *" processes "* ]]; then
  num_gpus=$("$python" -c "import jax; print(jax.device_count())")
  contract=$(echo test_{dispatch,combine,all_to_all,split,wires,gradients,transforms}.py)
  in_processes="$installed -m jax_ep.launch -n $num_gpus $python -m"
  over_nvshmem="env XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_EP_NODE_SIZE=${GPUS_PER_HOST:-$((num_gpus / 2))}"
  run_contract="$in_processes pytest -q -k cuda -p no:cacheprovider ${PYTEST_ARGS:-} $contract"
  run_bench="$in_processes jax_ep.bench --wire fp8 --no-lax"
  step processes-2-nvlink $run_contract
  step processes-3-nvshmem $over_nvshmem $run_contract
  step processes-4-bench $run_bench --tokens 1,8,32,128,1024,4096 --json "$logs/bench-processes-4.json" ${BENCH_ARGS:-}
  step processes-5-bench-nvshmem $over_nvshmem $run_bench --tokens 1,8,32,128,1024 \
    --json "$logs/bench-processes-5.json" ${BENCH_ARGS:-}
fi
# The table of docs/performance.md; then what other shapes and settings cost with 128 tokens.
bench() {  # bench NAME ARGUMENT...
  step "bench-$1" $installed -m jax_ep.bench --json "$logs/bench-$1.json" --wire fp8 --no-lax "${@:2}" ${BENCH_ARGS:-}
}
bench 1-tokens --tokens 1,8,32,128,512,4096 --wire none,fp8
bench 2-hidden --tokens 128 --hidden 2048,4096,8192
bench 3-top-k --tokens 128 --top-k 1,16
bench 4-experts --tokens 128 --experts 32,512
bench 5-skewed --tokens 128,4096 --routing skewed
bench 6-num-sms --tokens 128,4096 --num-sms 24
bench 7-grad --tokens 128,4096 --wire none --grad
bench 8-lax --tokens 8,128 --chain 5 --lax
step layer "$python" benchmarks/moe_step.py --json "$logs/moe_step.json"
step overlap "$python" benchmarks/overlap.py --json "$logs/overlap.json"
"$python" scripts/gpu_report.py "$logs" || failed=1
exit $failed
