"""Every public name has an example in its docstring, and the examples run."""

import doctest
import operator

import jax
import pytest

import jax_ep as ep
from helpers import in_one_process

pytestmark = in_one_process


def run(docstring, name, globals_):
    """Runs the examples of a docstring, of which there is at least one; the names that they leave."""
    examples = doctest.DocTestParser().get_doctest(docstring, globals_, name, None, None)
    said = []
    failures = doctest.DocTestRunner().run(examples, out=said.append, clear_globs=False).failed
    assert not failures, "".join(said)
    assert examples.examples, "there is no example"
    return examples.globs


@pytest.fixture(scope="module")
def names():
    """The names that the package's own example leaves."""
    if jax.device_count() > 8:
        pytest.skip("the examples take all devices")
    globals_ = run(ep.__doc__, "jax_ep", {})
    yield globals_
    globals_["group"].close()


MEMBERS = [
    *(f"Group.{name}" for name in ("check", "close", "open", "stats")),
    "Dispatched.row_expert", "Expanded.row_expert", "GroupStats.to_dict",
]  # fmt: skip


@pytest.mark.parametrize("name", [*ep.__all__, *(f"moe.{name}" for name in ep.moe.__all__), *MEMBERS])
def test_the_example_runs(names, name):
    run(operator.attrgetter(name)(ep).__doc__, name, names)
