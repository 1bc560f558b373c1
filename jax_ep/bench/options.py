"""Checks the options of the bench, and of the programs in benchmarks/."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jax_ep as ep
from jax_ep import _checks
from jax_ep._constants import MAX_TOP_K
from jax_ep._settings import MAX_SMS
from jax_ep._wires import CHANNELS_PER_UNIT
from jax_ep.bench.cases import Case


def sms_or_auto(text: str) -> int | None:
    """Parses an option: the number of SMs that an operation may use, or auto."""
    return None if text == "auto" else int(text)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def case_of(options: argparse.Namespace, num_ranks: int, **others: Any) -> Case:
    """Returns the case with the sizes and the dtype of the options, without a wire. `others`: other fields."""
    sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "top_k", "experts", "dtype")}
    return Case(**{"ranks": num_ranks, "wire": None, "layout": "ragged", **sizes, **others})


def mismatches(options: argparse.Namespace, num_ranks: int) -> Iterator[str]:
    """Yields a message for each wrong option: what it is, and what it must be. Call it before you measure.

    Options that are fields of a `Case` must have the same names. An option may be missing, or be a list. Every int must
    be at least 1.
    """

    def given(name: str) -> list[Any]:
        value = getattr(options, name, None)
        values = value if isinstance(value, list) else [value]
        return [value for value in values if value is not None]

    for name in vars(options):
        for number in given(name):
            try:
                if type(number) is int:  # not a bool
                    _checks.integer(flag(name), number, 1, MAX_SMS if name == "num_sms" else None)
            except ValueError as error:
                yield str(error)
    experts, itemsize = min(given("experts")), jnp.dtype(options.dtype).itemsize
    for top_k in given("top_k"):
        if top_k > (most := min(experts, MAX_TOP_K)):
            yield f"--top-k is {top_k}; it must be 1 to {most}, with --experts={experts}"
    for experts in given("experts"):
        if experts % num_ranks:
            yield f"--experts is {experts}; it must be a multiple of the {num_ranks} devices"
    for hidden in given("hidden"):
        if hidden % (unit := 16 // itemsize):
            yield f"--hidden is {hidden}; it must be a multiple of {unit}, 16 bytes in {options.dtype}"
        for name in ("wire", "combine_wire", "grad_wire"):
            if given(name) and hidden % (unit := CHANNELS_PER_UNIT):
                yield f"--hidden is {hidden}; it must be a multiple of {unit}, with {flag(name)}={given(name)[0]}"
    for factor in given("capacity_factor"):
        if not 0 < factor < math.inf:
            yield f"--capacity-factor is {factor}; it must be positive and finite"
    if given("grad_wire") and not getattr(options, "grad", False):
        yield f"--grad-wire is {given('grad_wire')[0]}; it needs --grad"
    for backend in given("backend"):
        if backend != "auto" and not (status := ep.backends()[backend]).available:
            yield f"--backend is {backend}, which cannot be used here: {status.reason}"
    for name in ("json", "plot"):
        for file in given(name):
            if not Path(file).parent.is_dir():
                yield f"{flag(name)} is {file}, in a directory that does not exist; make it first"
            elif Path(file).is_dir():
                yield f"{flag(name)} is {file}, a directory; name a file in it"
    for folder in given("report"):
        is_new = not Path(folder).exists()
        if not is_new and not Path(folder).is_dir():
            yield f"--report is {folder}, a file; name a directory, which may be new"
        elif not Path(folder).parent.is_dir():
            yield f"--report is {folder}, in a directory that does not exist; make it first"
        elif not os.access(Path(folder).parent if is_new else folder, os.W_OK | os.X_OK):
            yield f"--report is {folder}, where this user may not write; name another directory"
    for file in given("plot"):
        from matplotlib.backend_bases import FigureCanvasBase

        ending, formats = Path(file).suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
        if ending not in ["", *formats]:
            yield f"--plot is {file}; it must end in .{', .'.join(sorted(formats))}"
