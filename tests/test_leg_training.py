"""benchmarks/leg_training.py."""

import json

from helpers import load_program

leg_training = load_program("benchmarks/leg_training.py")


def test_each_choice_trains_with_each_seed(monkeypatch, tmp_path, capsys):
    asked = []

    def train(options):
        asked.append(options)
        return {"held_out": len(asked), "loss": 1.5, "grad_norm": 0.25}

    monkeypatch.setattr(leg_training, "train", train)
    file = tmp_path / "legs.json"
    options = ["--seeds", "3", "4", "--choices", "none", "all=fp8", f"--json={file}", "--", "--mesh=1x2"]
    assert leg_training.main(options) == 0
    common = ["--steps=300", "--dtype=bfloat16", "--mesh=1x2"]
    wires = ["--wire=fp8", "--combine-wire=fp8", "--combine-grad-wire=fp8", "--grad-wire=fp8"]
    assert asked == [[*common, f"--seed={seed}", *legs] for seed in (3, 4) for legs in ([], wires)]
    assert [row["held_out"] for row in json.loads(file.read_text())] == [1, 2, 3, 4]
    same = "1.500 (1.500 to 1.500) | 0.250 (0.250 to 0.250)"
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"| none | 2.000 (1.000 to 3.000) | {same} | 0.000 (0.000 to 0.000) |"
    assert lines[3] == f"| all=fp8 | 3.000 (2.000 to 4.000) | {same} | 1.000 (1.000 to 1.000) |"
