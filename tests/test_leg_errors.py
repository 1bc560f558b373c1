"""benchmarks/leg_errors.py, and its table in docs/concepts.md."""

from helpers import ROOT, load_program, make_mesh, open_group
from shapes import Shape

leg_errors = load_program("benchmarks/leg_errors.py")

BOUNDS = {"none": 0.002, "fp8": 0.03, "fp8_pow2": 0.03, "fp8_e5m2": 0.06}


def test_errors_of_each_leg():
    """Of bfloat16 rows. Other backends give the same bits, or almost the same bits (test_legs.py)."""
    shape = Shape("errors", num_experts=64, top_k=8, hidden=1024, tokens=64, dtype="bfloat16")
    with open_group(make_mesh((8,)), shape, backend="reference") as group:
        rows = list(leg_errors.measure_errors(group, num_tokens=64))
    assert [(leg, name) for leg, name, _ in sorted(rows)] == sorted(
        (leg, name) for leg in leg_errors.LEGS for name in leg_errors.formats_of(leg)
    )
    for leg, name, error in rows:
        assert BOUNDS[name] / 3 <= error <= BOUNDS[name] or name == "none" and error == 0, (leg, name, error)
    assert leg_errors.table(rows) in (ROOT / "docs" / "concepts.md").read_text()
