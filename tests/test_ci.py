"""The development loop: .ci/run, and the versions of formatters and linters."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"
LEFT_OUT = "ci: LEFT OUT: "


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run. The commands that it calls are stand-ins, which succeed at once; FAIL names one that does not."""
    if not RUN.exists():
        pytest.skip("this is not a checkout")
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for command in ("bash", "dirname", "date", "basename"):
        (tmp_path / "bin" / command).symlink_to(shutil.which(command))

    def run(*commands, fail=""):
        for command in ("make", "python3", "id", *commands):
            stand_in = tmp_path / "bin" / command
            stand_in.write_text('#!/bin/bash\n[ "$FAIL" != "$(basename "$0")" ]\n')
            stand_in.chmod(0o755)
        env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "FAIL": fail}
        done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()

    return run


def test_ci_ends_with_what_it_leaves_out(ci):
    status, lines = ci()
    left_out = [line.removeprefix(LEFT_OUT) for line in lines if line.startswith(LEFT_OUT)]
    assert status == 0
    for what in (
        "no spin",
        "no Python 3.13",
        "no nvcc",
        *([] if os.path.exists("/proc/driver/nvidia") else ["no NVIDIA"]),
    ):
        assert any(what in line for line in left_out), what
    assert "ci: passed" in lines[lines.index(LEFT_OUT + left_out[0]) - 1]
    assert lines[-2].startswith(LEFT_OUT)


def test_ci_leaves_out_nothing_that_is_there(ci):
    _, lines = ci("spin", "nvcc")
    assert not any("no spin" in line or "no nvcc" in line for line in lines)


def test_ci_says_that_it_failed(ci):
    """A claim without results, too, ends it: the script's python3 is the one that checks claims."""
    status, lines = ci(fail="python3")
    assert status == 1
    assert "ci: FAILED with status 1; later steps did not run" in lines


def test_formatters_and_linters_are_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tools = [requirement for requirement in extras["dev"] if not requirement.startswith("jax_ep")]
    assert {"clang-format", "mypy", "ruff"} <= {tool.split("==")[0] for tool in tools}
    assert all("==" in tool for tool in tools)
