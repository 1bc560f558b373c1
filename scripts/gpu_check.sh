#!/usr/bin/env bash
# Builds jax_ep on a machine with GPUs, runs everything that needs a GPU, and adds what it found to benchmarks/results/.
#
#   scripts/gpu_check.sh                                    # all steps
#   scripts/gpu_check.sh build native tests                 # all parts of some steps
#   scripts/gpu_check.sh processes-2-nvlink bench-7-grad    # some parts
#
# The steps: build native sanitizer tests train processes bench matmul balance layer overlap peers.
#
# The script uses every GPU that it finds; CUDA_VISIBLE_DEVICES chooses. GPUs must be Hopper or newer, two or more, and a
# power of two. native, sanitizer, matmul, tests-3 and processes-one-gpu use one GPU, and need no second one.
#
# The script fetches nothing. The environment of $PYTHON (python3) must hold the packages of the extras cuda13 and test,
# without jax_ep itself. Some steps need more:
#
#   build       nvcc, CMake and Ninja on the PATH; pip, scikit-build-core and nanobind. The step builds the network
#               transport if nvidia-nvshmem-cu13 is installed.
#   native      nvcc, CMake and Ninja on the PATH
#   sanitizer   compute-sanitizer on the PATH, and the program that native built
#   processes   nvidia-nvshmem-cu13 at the time of build, for the parts over NVSHMEM
#   peers       PyTorch and DeepEP (benchmarks/peers.py). Without PyTorch, the step measures nothing.
#
# Without spin, the tests leave out the model of the protocol, which CI checks. Without git, JAX_EP_COMMIT must name the
# commit.
#
# Settings: GPUS_PER_HOST is how many GPUs count as one host in the parts over NVSHMEM (half of them). PYTEST_ARGS goes to
# pytest: "-m gpu" leaves out tests that need no GPU. If only one part of tests has the tests that PYTEST_ARGS selects,
# name that part. tests-3, processes-1 and processes-one-gpu take no PYTEST_ARGS and run all their tests. BENCH_ARGS goes
# to bench, matmul-1, processes-4 and processes-5. A part may take STEP_TIMEOUT (540) seconds. Logs stay in GPU_CHECK_LOGS
# (build/gpu_check).
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python")
steps=${*:-build native sanitizer tests train processes bench matmul balance layer overlap peers}
logs=$(realpath -m "${GPU_CHECK_LOGS:-build/gpu_check}")
mkdir -p "$logs"
# Runs Python in tests/. In this folder, Python would import this folder's jax_ep/, which has no native extensions.
installed="env -C tests $python"
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1          # NVLink multicast is not used
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}  # leave room for arenas
settings='GPUS_PER_HOST|PYTEST_ARGS|PYTEST_ADDOPTS|BENCH_ARGS|STEP_TIMEOUT|CUDA_VISIBLE_DEVICES'
ran=()
failed=0

# step NAME COMMAND...: runs a step if it was asked for. scripts/gpu_report.py reads NAME.log, NAME.status (exit status,
# seconds, the settings of this call) and what COMMAND writes to NAME.json and NAME.xml.
step() {
  local name=$1 begun=$SECONDS
  shift
  [[ " $steps " == *" ${name%%-*} "* || " $steps " == *" $name "* ]] || return 0
  rm -f "$logs/$name".*  # of an earlier call
  timeout "${STEP_TIMEOUT:-540}" "$@" >"$logs/$name.log" 2>&1
  local status=$?
  { echo "$status $((SECONDS - begun))"; env | grep -E "^($settings)="; } >"$logs/$name.status"
  ran+=("$name")
  [ $status -eq 0 ] || { failed=1; tail -n 40 "$logs/$name.log"; }
  echo "gpu_check: $name: $([ $status -eq 0 ] && echo ok || echo "FAILED ($status)"), $((SECONDS - begun)) s"
}

build_native_programs() {
  cmake -S tests/native -B build/native-gpu -G Ninja -DJAX_EP_GPU_TESTS=ON && cmake --build build/native-gpu &&
    cmake --build build/native-gpu --target timeline op_times
}
export -f build_native_programs

step build "$python" -m pip install --no-build-isolation --no-deps --force-reinstall \
  -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native -C cmake.define.JAX_EP_CUDA=ON .
step native-build bash -c build_native_programs
step native-run build/native-gpu/exchange_test
sanitizer() {  # sanitizer TOOL NUM_RANKS OPTION...
  step "sanitizer-$1" compute-sanitizer --tool "$1" "${@:3}" --error-exitcode 9 build/native-gpu/exchange_test "$2" quick
}
sanitizer memcheck 8
sanitizer racecheck 8
# Each warp has four barriers of its own. synccheck is slow with so many barriers, so it runs with two ranks only.
sanitizer synccheck 2 --num-cuda-barriers 32768
# Parts 1 and 2 may run at the same time.
some_tests=(test_{all_to_all,bench,combine,cuda,dispatch,doctor,examples}.py)
run_tests() {  # run_tests NUMBER ARGUMENT...
  # -v: so the log of a part that runs out of time shows which tests failed.
  step "tests-$1" $installed -m pytest "${@:2}" -v -p no:cacheprovider --junit-xml="$logs/tests-$1.xml" \
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
# All in float32: in TF32, rounding in the backends' different orders of summation would soon be amplified. The last part
# compares the loss curves of the two backends.
for backend in cuda reference; do
  step "train-$backend" env JAX_DEFAULT_MATMUL_PRECISION=highest "$python" examples/train_moe.py \
    --backend=$backend --steps=300 --dtype=float32 --out="$logs/$backend"
done
step train-curves "$python" scripts/compare_training.py "$logs/cuda" "$logs/reference"
# One process per GPU: the tests of several processes; then the tests of the API, over NVLink, and over NVSHMEM between
# two halves of the GPUs; then the times of operations over NVLink and over NVSHMEM.
step processes-1 $installed -m pytest test_multiprocess.py -m gpu -q -p no:cacheprovider
# Two processes share one GPU in time slices, once per way to map memory. (NCCL refuses two ranks on one GPU, so these
# programs use no collective of XLA.)
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
  api_tests=$(echo test_{dispatch,combine,all_to_all,split,wires,gradients,transforms}.py)
  in_processes="$installed -m jax_ep.launch -n $num_gpus $python -m"
  over_nvshmem="env XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_EP_NODE_SIZE=${GPUS_PER_HOST:-$((num_gpus / 2))}"
  run_api_tests="$in_processes pytest -q -k cuda -p no:cacheprovider ${PYTEST_ARGS:-} $api_tests"
  run_bench="$in_processes jax_ep.bench --wire fp8 --no-lax"
  step processes-2-nvlink $run_api_tests
  step processes-3-nvshmem $over_nvshmem $run_api_tests
  step processes-4-bench $run_bench --tokens 1,8,32,128,1024,4096 --json "$logs/processes-4-bench.json" ${BENCH_ARGS:-}
  step processes-5-bench-nvshmem $over_nvshmem $run_bench --tokens 1,8,32,128,1024 \
    --json "$logs/processes-5-bench-nvshmem.json" ${BENCH_ARGS:-}
fi
# The tables of docs/performance.md. Every part times the bench's default chain of pairs, also for lax.
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
bench 8-lax --tokens 8,128 --wire none,fp8 --lax
bench 9-token --tokens 128,4096 --layout token --num-sms auto,24,12
bench 10-legs --tokens 128,512,4096 --combine-wire none,fp8
bench 11-grad-legs --tokens 128,512,4096 --combine-wire fp8 --grad --grad-wire none,fp8,fp8_e5m2
bench 12-capacity --tokens 128,512,4096 --wire none --grad --capacity-factor 1.25
bench 13-capacity-fp8 --tokens 128,512,4096 --combine-wire fp8 --grad --grad-wire fp8 --capacity-factor 1.25
# On one GPU: the experts' matrix products, and a layer beside its parts. Without CUTLASS's headers at the time of build,
# there is no grouped GEMM, and all parts of matmul but the first fail.
first_gpu=${CUDA_VISIBLE_DEVICES:-0}
first_gpu=${first_gpu%%,*}
step matmul-1-experts env CUDA_VISIBLE_DEVICES="$first_gpu" $installed -m jax_ep.bench experts \
  --groups uniform,lognormal,one-hot --json "$logs/matmul-1-experts.json" ${BENCH_ARGS:-}
step matmul-2-parts env CUDA_VISIBLE_DEVICES="$first_gpu" "$python" benchmarks/mlp_parts.py --json "$logs/matmul-2-parts.json"
step matmul-3-token env CUDA_VISIBLE_DEVICES="$first_gpu" "$python" benchmarks/mlp_parts.py --layout token \
  --implementations grouped --json "$logs/matmul-3-token.json"
# As one of four ranks: four times the tokens, and two of the eight experts of each.
step matmul-4-token-of-4 env CUDA_VISIBLE_DEVICES="$first_gpu" "$python" benchmarks/mlp_parts.py --layout token \
  --implementations grouped --tokens 16384 --local-experts-per-token 2 --experts 64 --json "$logs/matmul-4-token-of-4.json"
# Balanced placement: its kernels, and a layer's step under skewed routing. balance-2-step needs the grouped GEMM, too.
step balance-1-kernels $installed -m jax_ep.bench balance --json "$logs/balance-1-kernels.json"
step balance-2-step "$python" benchmarks/moe_step.py --skew 0 0.5 1 1.5 hot --compute grouped \
  --json "$logs/balance-2-step.json"
step layer "$python" benchmarks/moe_step.py --json "$logs/layer.json"
overlap() {  # overlap NAME ARGUMENT...
  step "overlap-$1" "$python" benchmarks/overlap.py --json "$logs/overlap-$1.json" "${@:2}"
}
overlap 1-recipes
overlap 2-sms --layout token --gemm-rows 16384 --num-sms 8 12 16 24 --forms "shared expert" "shared expert, backward"
step peers "$python" benchmarks/peers.py --json "$logs/peers.json"
"$python" scripts/gpu_report.py "$logs" ${ran[@]+"${ran[@]}"} || failed=1
exit $failed
