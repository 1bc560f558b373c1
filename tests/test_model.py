"""The model of the protocol (tests/model/protocol.pml), checked exhaustively by spin; its mutants must fail."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "model" / "protocol.pml"
COMPILER = shutil.which("cc")

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("spin") and COMPILER),
        reason="the model needs spin and a C compiler (Debian: apt-get install spin gcc)",
    ),
    pytest.mark.timeout(1200),  # two minutes of computing, next to whatever else the machine computes
]

SETTINGS = [
    "RANKS=3 SLOTS=2 OPS=2 ROWLESS=0 ONE_SENDER FAULT STARTS=1",  # takes longest
    "RANKS=3 SLOTS=2 OPS=3 ROWLESS=0 ONE_SENDER FAULT STARTS=0",
    "RANKS=2 SLOTS=2 OPS=3 STARTS=2",
    "RANKS=2 SLOTS=2 OPS=3 ROWLESS=1",
    "RANKS=2 SLOTS=2 OPS=4 ROWLESS=0 ONE_SENDER",
    "RANKS=2 SLOTS=4 OPS=4 ROWLESS=0 ONE_SENDER",
    "RANKS=2 SLOTS=4 OPS=6 ROWLESS=0 ONE_SENDER STARTS=2",
    "RANKS=2 SLOTS=2 OPS=3 ROWLESS=0 FAULT",
    "RANKS=2 SLOTS=4 OPS=6 ROWLESS=0 ONE_SENDER FAULT STARTS=1",
    "RANKS=2 SLOTS=2 OPS=3 ROWLESS=0 HASTE STARTS=1",
    "RANKS=3 SLOTS=2 OPS=2 ROWLESS=0 ONE_SENDER",
    "RANKS=3 SLOTS=2 OPS=4 ROWLESS=0 ONE_SENDER STARTS=1",
    "RANKS=2 SLOTS=2 OPS=6 ROWLESS=1 ROUNDS STARTS=0",
    "RANKS=3 SLOTS=2 OPS=3 ROWLESS=0 ROUNDS STARTS=0",
    "RANKS=3 SLOTS=2 OPS=2 ROWLESS=0 ROUNDS STARTS=0 FAULT",
]

OVERWRITTEN = r"assertion violated .*\.read=="
LOST_ROW = r"assertion violated .*\.unit=="
STUCK = "invalid end state"
WAITED_TWICE = r"assertion violated .*time_is_up"
TWO_RANKS = "RANKS=2 SLOTS=2 OPS=3"
MUTANTS = [
    (f"{TWO_RANKS} WITHOUT=CLAIM", OVERWRITTEN),
    (f"{TWO_RANKS} WITHOUT=NEWEST_IS_WHOLE", OVERWRITTEN),
    (f"{TWO_RANKS} WITHOUT=WHOLE_SLOT", OVERWRITTEN),
    (f"{TWO_RANKS} WITHOUT=LATER_WORDS", STUCK),
    (f"{TWO_RANKS} WITHOUT=END_OF_KERNEL", LOST_ROW),
    (f"{TWO_RANKS} WITHOUT=READING_BEFORE_FINISHING", OVERWRITTEN),
    (f"{TWO_RANKS} WITHOUT=TELLING_OF_WHOLES", STUCK),
    (f"{TWO_RANKS} WITHOUT=TELLING_OF_DONES", STUCK),
    (f"{TWO_RANKS} ROWLESS=0 ONE_SENDER WITHOUT=ONE_TELLER", STUCK),
    (f"{TWO_RANKS} FAULT WITHOUT=WARNING", WAITED_TWICE),
    (f"{TWO_RANKS} FAULT WITHOUT=LOOKING_AT_FAILED", STUCK),
    (f"{TWO_RANKS} ROUNDS STARTS=0 WITHOUT=NOTIFYING_FIRST", STUCK),
]


def check(setting, folder):
    """What spin's checker says of the model with a setting."""
    shutil.copy(MODEL, folder)
    defines = [f"-D{define}" for define in setting.split()]
    for command in (
        ["spin", *defines, "-a", MODEL.name],
        [COMPILER, "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"],
        ["./pan", "-m100000"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """What spin says of each setting of the tests that are to run, when it is there: two at a time."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    settings = [item.callspec.params["setting"] for item in ours]
    with ThreadPoolExecutor(2) as pool:
        yield {setting: pool.submit(check, setting, tmp_path_factory.mktemp("model")) for setting in settings}


@pytest.mark.parametrize("setting", SETTINGS)
def test_protocol(setting, reports):
    """No slot is overwritten before it is read, no row is lost, nobody waits forever."""
    report = reports[setting].result()
    assert "errors: 0" in report, report
    assert "not completed" not in report and "too small" not in report, report


@pytest.mark.parametrize(("setting", "failure"), MUTANTS)
def test_each_order_is_needed(setting, failure, reports):
    report = reports[setting].result()
    assert re.search(failure, report), report


def test_every_order_has_a_mutant():
    orders = re.findall(r"^#define (\w+) [1-9]", MODEL.read_text().split("#ifndef WITHOUT")[0], re.MULTILINE)
    assert orders == [setting.split("WITHOUT=")[1] for setting, _ in MUTANTS]
