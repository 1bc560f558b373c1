"""scripts/many_seeds.sh counts the seeds that pass, and shows those that fail."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "many_seeds.sh"

# Stands in for CMake: the program that it "builds" fails as FAILS says, a condition on the seed and on the first seed.
# With ENDLESS, the program writes its process id to this file, and then takes a minute.
CMAKE = r"""#!/bin/bash
[ "$1" = -S ] || exit 0
[ -z "$NO_BUILD" ] || { echo "a header is missing"; exit 1; }
mkdir -p "$4"
cat >"$4/emulated_exchange_test" <<'END'
#!/bin/bash
first=$2
[ -z "$ENDLESS" ] || { echo $$ >>"$ENDLESS"; exec sleep 60; }
for ((seed = first; seed < first + $3; ++seed)); do
  if (( $FAILS )); then echo "exchange.h:1: rows differ"; echo "seed $seed has failed: $1 on 2 ranks"; exit 1; fi
done
END
chmod +x "$4/emulated_exchange_test"
"""


@pytest.fixture
def many_seeds(tmp_path):
    if not SCRIPT.exists():
        pytest.skip("this is not a checkout")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").write_text(CMAKE)
    (tmp_path / "bin" / "cmake").chmod(0o755)

    def start(*arguments, fails="0", **environment):
        environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAILS": fails, "JOBS": "2"}
        command = [SCRIPT, *arguments, tmp_path / "build"]
        return subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(*arguments, **settings):
        with start(*arguments, **settings) as script:
            stdout, _ = script.communicate()
        return script.returncode, stdout.splitlines()

    run.start = start
    return run


def test_all_seeds_pass(many_seeds):
    status, lines = many_seeds("1", "90")
    assert status == 0
    assert lines[-1].startswith("many_seeds: 90 of 90 seeds passed")


def test_seeds_that_fail_are_counted_and_shown(many_seeds):
    status, lines = many_seeds("5", "90", fails="seed % 10 == 7")
    assert status == 1
    at = next(i for i, line in enumerate(lines) if line.startswith("many_seeds: 77 of 86 seeds passed"))
    commands = [line for line in lines[at:] if "emulated_exchange_test seeds" in line]
    assert [line.split()[1:] for line in commands] == [["seeds", str(seed), "1"] for seed in (7, 17, 27, 37, 47)]
    assert "seed 7 has failed: seeds on 2 ranks" in lines


def test_seeds_that_fail_only_behind_others(many_seeds):
    status, lines = many_seeds("1", "90", fails="seed == 50 && first != 50")
    assert status == 1
    assert any(line.startswith("many_seeds: 90 of 90 seeds passed") for line in lines)
    assert any(line.endswith("emulated_exchange_test seeds 41 40") for line in lines)


def test_only_operations_in_rounds(many_seeds):
    status, lines = many_seeds("1", "90", fails="seed == 50", SEEDS="rounds")
    assert status == 1
    assert any(line.endswith("emulated_exchange_test rounds 50 1") for line in lines)
    assert "seed 50 has failed: rounds on 2 ranks" in lines


def test_no_process_stays_behind(many_seeds, tmp_path):
    """`timeout scripts/many_seeds.sh` sends a signal to the script's group of processes."""
    pids = tmp_path / "pids"
    with many_seeds.start("1", "90", ENDLESS=str(pids)) as script:
        try:
            await_true(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        finally:
            os.killpg(script.pid, signal.SIGTERM)
    await_true(lambda: not any(map(is_running, pids.read_text().split())))


def await_true(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, PermissionError):  # or the number is another user's process by now
        return False
    return True


def test_a_build_that_fails(many_seeds):
    status, lines = many_seeds("1", "90", NO_BUILD="1")
    assert status == 1
    assert lines == ["a header is missing"]


@pytest.mark.parametrize(
    ("arguments", "seeds"), [(("0", "9"), ""), (("9", "8"), ""), (("one", "9"), ""), (("1", "9"), "round")]
)
def test_no_range_of_seeds(many_seeds, arguments, seeds):
    status, lines = many_seeds(*arguments, SEEDS=seeds)
    assert status == 2
    assert lines == []
