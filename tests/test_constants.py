"""The constants that Python and C++ share have one source."""

import pytest

from helpers import ROOT, load_program
from jax_ep import _constants, _layouts, _wires

WRITER = load_program("scripts/write_constants.py")


def test_the_header_is_up_to_date():
    header = WRITER.header(WRITER.SOURCE.read_text())
    assert WRITER.HEADER.read_text() == header, "run python scripts/write_constants.py"


def test_the_header_has_every_constant():
    header = WRITER.HEADER.read_text()
    for name, value in vars(_constants).items():
        if isinstance(value, int):
            assert f" {WRITER._k(name)} = {value};" in header
        elif isinstance(value, type) and issubclass(value, _constants.enum.IntEnum):
            _, _, members = header.partition(f"enum class {name} ")
            members, _, _ = members.partition("};")
            for member in value:
                assert f"  {WRITER._k(member.name)} = {member.value},\n" in members


def test_failure_reasons_have_their_words_in_the_header():
    _, _, words = WRITER.HEADER.read_text().partition("kFailureReasonNames[] = {")
    words, _, _ = words.partition("}")
    assert [word.strip(' \n"') for word in words.split(",")][:-1] == [each.words for each in _constants.FailureReason]


def test_layouts_have_their_names_in_the_header():
    _, _, names = WRITER.HEADER.read_text().partition("kLayoutNames[] = {")
    names, _, _ = names.partition("}")
    assert tuple(name.strip(' \n"') for name in names.split(","))[:-1] == tuple(_layouts.LAYOUTS)


def test_layouts_and_wires_are_numbered():
    assert [layout.upper() for layout in _layouts.LAYOUTS] == [each.name for each in _constants.Layout]
    casts = [_constants.Cast.NONE, *(wire.cast for wire in _wires.GRAD_WIRES.values())]
    assert casts == list(_constants.Cast)


@pytest.mark.parametrize(
    "name", ["kMaxRanks", "kMaxLocalRanks", "kMaxTopK", "kChannelsPerScale", "enum class Layout", "enum class Cast"]
)
def test_no_other_file_defines_them(name):
    definition = f"{name} =" if name.startswith("k") else f"{name} "
    sources = [path for path in (ROOT / "ffi").rglob("*") if path.suffix in (".h", ".cuh", ".cc", ".cu")]
    assert [path for path in sources if definition in path.read_text()] == [WRITER.HEADER]
