"""The list of the tests that do not run on emulated GPUs is complete, and has nothing else."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from not_emulated import NOT_EMULATED


def marks(thing, name):
    found = getattr(thing, "pytestmark", [])
    return [mark for mark in (found if isinstance(found, list) else [found]) if mark.name == name]


def all_tests():
    """All test functions, by the names that NOT_EMULATED has for them; each with its module."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == module.__name__:
                yield f"{path.name}::{name}", function, module


def values(function):
    """The values, or their names, with which pytest calls the function."""
    for mark in marks(function, "parametrize"):
        yield from mark.kwargs.get("ids") or mark.args[1]


def test_each_listed_test_exists():
    existing = {name: function for name, function, _ in all_tests()}
    for entry in NOT_EMULATED:
        name, value = re.fullmatch(r"([^[]+)(?:\[(.+)\])?", entry).groups()
        assert name in existing, entry
        assert value is None or value in values(existing[name]), entry


def test_each_test_of_gpus_alone_is_listed():
    """One that takes a backend runs emulated. One with the mark gpu, on all or one of its cases, does not."""
    for name, function, module in all_tests():
        cases = [value for mark in marks(function, "parametrize") for value in mark.args[1]]
        if marks(module, "gpu") or marks(function, "gpu") or any(is_gpu_case(case) for case in cases):
            assert name in NOT_EMULATED, f"{name} needs GPUs; say in tests/not_emulated.py why it is not emulated"


def is_gpu_case(case):
    return any(mark.name == "gpu" for mark in getattr(case, "marks", ()))


@pytest.mark.parametrize("entry", [entry for entry in NOT_EMULATED if "[" in entry])
def test_no_test_is_listed_twice(entry):
    assert entry.partition("[")[0] not in NOT_EMULATED
