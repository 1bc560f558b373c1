"""The declarations of FFI targets agree with the handlers in ffi/cuda."""

import re
from itertools import chain

import jax
import jax.numpy as jnp
import pytest

from helpers import ROOT
from jax_ep._backends import targets

FILES = ("handlers", "balance_handlers", "expand_handlers")
HANDLERS = "".join((ROOT / "ffi" / "cuda" / f"{name}.cc").read_text() for name in FILES)
BINDINGS = (ROOT / "ffi" / "cuda" / "bindings.h").read_text()
WHOLE_AND_STARTS = [*targets.TARGETS, *(target.start for target in targets.SPLIT)]
DONES = [target.done for target in targets.SPLIT]


def handler(name):
    """The parameters of a handler: (type of the attributes, names of operands, names of results)."""
    parameters = re.search(rf"^ffi::Error {name}\((.*?)\) \{{", HANDLERS, re.DOTALL | re.MULTILINE)[1]
    typed = [re.split(r" +", parameter.strip()) for parameter in re.sub(r"\s+", " ", parameters).split(",")]
    named = {kind: [words[-1] for words in typed if words[0] == kind] for kind in ("Operand", "Result")}
    attributes = [words[0] for words in typed if words[0].endswith("Attrs")]
    return attributes, named["Operand"], named["Result"]


def members(structs):
    """The attributes that XLA decodes into the struct, if there is one."""
    if not structs:
        return []
    (struct,) = structs
    decoding = re.search(rf"DECODING\(jax_ep::{struct},(.*?)\);", HANDLERS + BINDINGS, re.DOTALL)[1]
    return re.findall(r'"(\w+)"', decoding)


@pytest.mark.parametrize("target", [*WHOLE_AND_STARTS, *targets.LOCAL], ids=lambda target: target.name)
def test_handlers_have_the_declared_names_in_order(target):
    attributes, operands, results = handler(target.name)
    assert [operand.name for operand in target.operands] == operands
    assert [result.name for result in target.results] == results
    of_group = [] if target in targets.LOCAL else ["group", "hash"]
    assert [*of_group, *target.attributes] == members(attributes)


@pytest.mark.parametrize("target", [*WHOLE_AND_STARTS, *targets.LOCAL], ids=lambda target: target.name)
def test_bindings_have_as_many_buffers(target):
    wrapper = "local" if target in targets.LOCAL else "with_order_token"
    (binding,) = re.findall(rf"{wrapper}\({target.name}, [^,]*\),\s*\(with_buffers<(\d+), (\d+)>", HANDLERS)
    assert binding == (str(len(target.operands)), str(len(target.results)))


def test_all_targets_are_declared():
    registered = re.findall(r'\{"jax_ep_(\w+)", k\w+\}', HANDLERS)
    declared = [target.name for target in chain(WHOLE_AND_STARTS, DONES, targets.LOCAL)]
    assert sorted(registered) == sorted([*declared, "room"])


@pytest.mark.parametrize("target", targets.SPLIT, ids=lambda target: target.name)
def test_a_start_keeps_what_its_done_takes(target):
    """A start keeps addresses of its operands but for axis_index, and of `pending`; the done compares them."""
    body = re.search(rf"^ffi::Error {target.name}_start\(.*?^\}}", HANDLERS, re.DOTALL | re.MULTILINE)[0]
    kept = re.search(r"addresses\((.*?)\)", body, re.DOTALL)[1]
    assert re.split(r",\s*", kept) == [operand.name for operand in target.done.operands]


def test_operands_that_do_not_fit_are_refused():
    operands = {
        "axis_index": jnp.int32(0),
        "y": jnp.zeros((2, 3, 16)),
        "num_sent": jnp.zeros(2, jnp.int32),
        "send_index": jnp.zeros((3, 2), jnp.int32),
    }
    target = targets.ALL_TO_ALL_BACK
    results = target.result_types(operands, {}, {"out": jnp.float32})
    assert results == {"out": ((3, 16), jnp.float32)}
    assert target.in_order(operands) == tuple(operands.values())
    for wrong in jnp.zeros((3, 3), jnp.int32), jnp.zeros((3, 2)):
        with pytest.raises(TypeError, match="all_to_all_back: send_index is "):
            target.result_types(operands | {"send_index": wrong}, {}, {"out": jnp.float32})
    with pytest.raises(TypeError, match="y_cotangent"):
        target.in_order(operands | {"y_cotangent": jax.Array})
