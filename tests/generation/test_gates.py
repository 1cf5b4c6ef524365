"""Gates are data: each number against its threshold, with a reason, in a file that a script reads."""

import json

from hf_ext.generation.judging.gates import REQUIREMENTS, check_gates, have_passed, write_gates

GOOD = {
    1: {"num_errors": 0, "token_loss": 0.1, "reproduced": 0.9, "valid": 0.5},
    2: {"num_validation_falls": 1, "valid": 0.5, "share_above": 0.3, "unique": 0.5},
    3: {"correlation": 0.41, "valid": 0.7, "share_above": 0.5, "beats_random": 0.01},
}
BAD = {
    1: {"num_errors": 1, "token_loss": 0.11, "reproduced": 0.89, "valid": 0.49},
    2: {"num_validation_falls": 0, "valid": 0.49, "share_above": 0.29, "unique": float("nan")},
    3: {"correlation": 0.4, "valid": 0.69, "share_above": None, "beats_random": 0.0},
}


def test_the_specifications_thresholds_decide():
    for stage, good in GOOD.items():
        assert [*good] == [one.name for one in REQUIREMENTS[stage]]
        assert have_passed(check_gates(stage, good))
        for name, value in BAD[stage].items():
            gates = check_gates(stage, {**good, name: value})
            assert [gate.name for gate in gates if not gate.passed] == [name]
            assert not have_passed(gates)
    assert have_passed(check_gates(1, {**GOOD[1], "token_loss": 0.3}, {"token_loss": 0.3}))


def test_a_gate_says_its_value_what_is_needed_and_why():
    gate = check_gates(2, {**GOOD[2], "valid": 0.06})[1]
    assert (gate.value, gate.threshold, gate.passed) == (0.06, 0.5, False)
    assert gate.reason.startswith("0.060; at least 0.500 is needed (share of outputs that are valid")


def test_what_was_not_measured_fails_and_what_cannot_be_does_not():
    numbers = {name: value for name, value in GOOD[2].items() if name != "share_above"}
    missing = check_gates(2, numbers)[2]
    assert (missing.value, missing.passed) == (None, False)
    assert missing.reason.startswith("not measured; ")
    gates = check_gates(2, numbers, not_applicable={"share_above": "these data have no affinities"})
    assert (gates[2].passed, gates[2].reason) == (None, "does not apply: these data have no affinities")
    assert have_passed(gates)
    assert not have_passed([gates[2]])  # nothing passed


def test_gates_json_holds_every_stage_that_was_run(tmp_path):
    path = tmp_path / "gates.json"
    written = write_gates(path, {1: check_gates(1, GOOD[1]), 2: check_gates(2, BAD[2])})
    assert json.loads(path.read_text()) == written
    assert [written["passed"], *(one["passed"] for one in written["stages"].values())] == [False, True, False]
    assert {*written["stages"]["1"]["gates"][0]} == {"name", "value", "threshold", "passed", "reason"}
    assert write_gates(path, {1: check_gates(1, GOOD[1])})["passed"]
    assert not write_gates(path, {})["passed"]
    assert [one.name for one in tmp_path.iterdir()] == ["gates.json"]
