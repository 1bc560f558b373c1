"""The command jax-ep."""

import ast
import json
import re
import sys
import tomllib

import pytest

import jax_ep as ep
from helpers import ROOT, in_one_process
from jax_ep import _cli

COMMANDS = list(_cli._COMMANDS)
PACKAGE = sorted((ROOT / "jax_ep").rglob("*.py"))
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = in_one_process


def test_pyproject_names_the_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jax-ep": f"{_cli.__name__}:{_cli.main.__name__}"}


def test_help_names_all_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        _cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^  (\w+)  ", printed, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        _cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jax-ep {command} ")


@pytest.mark.parametrize("arguments", [[], ["doktor"]])
def test_no_such_command(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        _cli.main(arguments)
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        _cli.main(["--version"])
    assert capsys.readouterr().out.strip() == ep.__version__


def test_doctor(capsys):
    assert _cli.main(["doctor", "--json", "--ranks=2"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["ranks"] == 2


def test_launch_returns_the_status_of_the_program():
    assert _cli.main(["launch", "-n", "1", sys.executable, "-c", "exit(3)"]) == 3


@pytest.mark.parametrize("path", [*PACKAGE, *DOCUMENTS], ids=lambda path: path.name)
def test_commands_that_are_named_exist(path):
    named = re.findall(r"(?:`|\$ |^ *|launch -n \d )jax-ep +(\w+)", path.read_text(), re.MULTILINE)
    assert set(named) <= set(COMMANDS)


def texts(source):
    """The strings of a module but for its docstrings: among them, all that users are told."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_no_message_names_a_file_of_a_checkout(path):
    """An installed user has no scripts/."""
    assert not [text for text in texts(path.read_text()) if "scripts/" in text]
