#!/usr/bin/env bash
# Builds the native exchange test for emulated GPUs and runs a range of its seeds on all cores (docs/emulator.md).
#
#   scripts/many_seeds.sh 1 10000                    # seeds 1 to 10000; builds in build/native
#   scripts/many_seeds.sh 1 10000 build/many_seeds   # builds in another folder
#   SEEDS=rounds scripts/many_seeds.sh 1 10000       # with each seed, only operations in rounds, or another part
#
# Needs g++, CMake, and Ninja or make. JOBS is the number of processes at a time (the number of cores). A process runs 40
# seeds. If it fails, the script runs each of its seeds alone. The last lines are the number of seeds that passed, and the
# commands of the first failures. The exit status is 1 if a seed fails.
set -u
if [[ $# -lt 2 || $# -gt 3 || ! "$1 $2" =~ ^[0-9]{1,15}\ [0-9]{1,15}$ || 10#$1 -lt 1 || 10#$2 -lt 10#$1 ||
  ! ${SEEDS:-seeds} =~ ^(seeds|scenarios|failures|rounds|rare_orders|two_groups)$ ]]; then
  sed -n '/^#   /s/^# *//p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.." || exit
first=$((10#$1)) last=$((10#$2)) folder=${3:-build/native}
jobs=${JOBS:-$(nproc)}
export last num_seeds=40 part=${SEEDS:-seeds} program="$folder/emulated_exchange_test"
[[ $program == /* ]] || program="./$program"
results=$(mktemp -d)
export results
trap 'rm -rf "$results"' EXIT

generator=()
[ -e "$folder/CMakeCache.txt" ] || ! command -v ninja >/dev/null || generator=(-G Ninja)
build() {
  cmake -S tests/native -B "$folder" ${generator[@]+"${generator[@]}"} &&
    cmake --build "$folder" --target emulated_exchange_test --parallel "$jobs"
}
if ! build >"$results/build.log" 2>&1; then
  tail -n 40 "$results/build.log"
  exit 1
fi
echo "many_seeds: built in $SECONDS s"

# run_seeds FIRST COUNT SECONDS: runs seeds in one process. If the process fails, its output stays in a file. (With
# --foreground, a signal to the script's group of processes ends this process, too.)
run_seeds() {
  local log=$results/$1-$2.failed
  timeout --foreground "$3" "$program" "$part" "$1" "$2" >"$log" 2>&1
  local status=$?
  [ $status -ne 0 ] || { rm "$log"; return 0; }
  echo "ended with status $status" >>"$log"
  return 1
}
# run_process FIRST: runs the seeds of one process; if it fails, each seed alone, for two minutes at most.
run_process() {
  local count=$((last - $1 + 1 < num_seeds ? last - $1 + 1 : num_seeds)) passed=0 seed
  if run_seeds "$1" "$count" 600; then
    passed=$count
  else
    for ((seed = $1; seed < $1 + count; ++seed)); do
      run_seeds "$seed" 1 120 && passed=$((passed + 1))
    done
    # The output of the whole process counts only if each seed passes alone.
    [ $passed -eq $count ] || rm "$results/$1-$count.failed"
  fi
  echo $passed >"$results/$1.passed"
}
export -f run_seeds run_process

seq "$first" $num_seeds "$last" | xargs --max-procs="$jobs" -I{} bash -c 'run_process {}'
passed=0 all=$((last - first + 1))
for file in "$results"/*.passed; do
  [ ! -e "$file" ] || passed=$((passed + $(<"$file")))
done
mapfile -t failures < <(cd "$results" && ls | grep '\.failed$' | sort -n)
echo "many_seeds: $passed of $all seeds passed ($SECONDS s)"
for failure in "${failures[@]:0:5}"; do
  seeds=${failure%.failed}
  echo "$program $part ${seeds/-/ }"
  head -n 1 "$results/$failure" | cut -c1-200
  tail -n 2 "$results/$failure" | cut -c1-300
done
[ $passed -eq $all ] && [ ${#failures[@]} -eq 0 ]
