"""No circle of imports runs through jax_ep, also not one that only a type checker sees."""

import ast
import graphlib

import pytest

from helpers import ROOT

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "jax_ep").rglob("*.py"))
}


def imports(source, modules):
    """The modules that a source names in its imports, wherever these are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import of jax_ep is absolute"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in modules)
            if node.module in modules and any(name not in modules for name in inner):
                yield node.module


def order(sources):
    graph = {name: set(imports(source, sources)) - {name} for name, source in sources.items()}
    return list(graphlib.TopologicalSorter(graph).static_order())


def test_modules_have_an_order():
    found = order({name: path.read_text() for name, path in MODULES.items()})
    assert sorted(found) == sorted(MODULES)
    assert found.index("jax_ep._settings") < found.index("jax_ep._types") < found.index("jax_ep._group")


def test_a_circle_is_found():
    sources = {
        "jax_ep": "",
        "jax_ep.a": "if TYPE_CHECKING:\n    from jax_ep import b",
        "jax_ep.b": "def f():\n    import jax_ep.c",
        "jax_ep.c": "from jax_ep.a import X",
    }
    with pytest.raises(graphlib.CycleError):
        order(sources)
