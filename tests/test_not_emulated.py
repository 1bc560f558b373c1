"""The lists of the tests that do not run on emulated GPUs are complete, and have nothing else.

conftest.py has an emulated test fail that is skipped and not listed.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from conftest import EMULATED, KERNEL_BACKENDS
from not_emulated import NOT_EMULATED, NOT_OVER_NETWORK


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
    yield from EMULATED
    for mark in marks(function, "parametrize"):
        yield from mark.kwargs.get("ids") or mark.args[1]


def test_each_listed_test_exists():
    existing = {name: function for name, function, _ in all_tests()}
    for entry in NOT_EMULATED | NOT_OVER_NETWORK:
        name, value = re.fullmatch(r"([^[]+)(?:\[(.+)\])?", entry).groups()
        assert name in existing, entry
        assert value is None or not EMULATED or value in values(existing[name]), entry


def test_each_test_of_gpus_alone_is_listed():
    """One that takes a backend runs emulated. One with the mark gpu, on all or one of its cases, does not."""
    for name, function, module in all_tests():
        cases = [value for mark in marks(function, "parametrize") for value in mark.args[1]]
        if marks(module, "gpu") or marks(function, "gpu") or any(is_gpu_case(case) for case in cases):
            assert name in NOT_EMULATED, f"{name} needs GPUs; say in tests/not_emulated.py why it is not emulated"


def is_gpu_case(case):
    return any(mark.name == "gpu" for mark in getattr(case, "marks", ()))


def test_no_test_chooses_its_backends():
    """The fixtures `backend` and `kernel_backend` do, for all tests."""
    assert KERNEL_BACKENDS[1:] == EMULATED
    for name, function, _ in all_tests():
        for mark in marks(function, "parametrize"):
            names = mark.args[0] if isinstance(mark.args[0], (tuple, list)) else mark.args[0].split(",")
            assert not {"backend", "kernel_backend"} & {one.strip() for one in names}, name


@pytest.mark.parametrize("entry", [*NOT_EMULATED, *NOT_OVER_NETWORK])
def test_no_test_is_listed_twice(entry):
    name, bracket, _ = entry.partition("[")
    assert not bracket or name not in NOT_EMULATED | NOT_OVER_NETWORK
    assert not (entry in NOT_EMULATED and entry in NOT_OVER_NETWORK)
