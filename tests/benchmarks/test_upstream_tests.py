"""Transformers' own tests on both sides: what is counted, and that each difference has a reason."""

import measured
import upstream_tests

XML = "<testsuites><testsuite>{}</testsuite></testsuites>"
CASE = '<testcase classname="tests.A" name="test_{}">{}</testcase>'


def outcomes(**parts):
    return upstream_tests.read_outcomes(XML.format("".join(CASE.format(*part) for part in parts.items())))


def test_what_passes_on_one_side_alone_is_named_with_its_reason():
    stock = outcomes(event_flow="", new="", hub="<error/>", gpu="<skipped/>", mine="<failure/>")
    ours = outcomes(event_flow="<failure/>", new="<error/>", hub="<error/>", gpu="<skipped/>", mine="")
    assert upstream_tests.compare(stock, ours) == {
        "Trainer": {"passed": 2, "failed": 2, "skipped": 1},
        "FastTrainer": {"passed": 1, "failed": 3, "skipped": 1},
        "pass with Trainer alone": {
            "test_event_flow": upstream_tests.REASONS["test_event_flow"],
            "test_new": "not known",
        },
        "pass with FastTrainer alone": ["test_mine"],
    }


def test_every_difference_that_was_found_has_a_reason():
    found = measured.read("upstream_tests")
    assert set(found["pass with Trainer alone"]) <= upstream_tests.REASONS.keys()
    lost = found["Trainer"]["passed"] - found["FastTrainer"]["passed"]
    assert lost == len(found["pass with Trainer alone"]) - len(found["pass with FastTrainer alone"])
