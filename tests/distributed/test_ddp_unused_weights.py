"""DDP without its search for unused weights trains to the same bits; a model with such weights keeps the search."""

import json
from pathlib import Path

import pytest
from equal_cases import load_numbers
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly

OWN = ["own", "function", "later"]  # losses of the user's
TWINS = [("not", "searching"), ("asked", "searching")] + [(n, f"{n}-searching") for n in ("spare", *OWN)]
SCRIPT = HELPERS / "unused_on_ranks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unused")
    run_on_ranks(SCRIPT, folder, limit_s=500)
    return folder


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_losses_and_weights_are_equal_bit_for_bit(folder, name, twin):
    ours, theirs = load_numbers(folder, name), load_numbers(folder, twin)
    assert len(ours[0]) == 4
    assert ours[0] == theirs[0]
    assert ours[0][0] != ours[0][-1]
    assert ours[1].keys() == theirs[1].keys()
    assert all(ours[1][weight].equal(theirs[1][weight]) for weight in theirs[1])


@pytest.mark.parametrize(
    ("name", "searches", "views"),
    [
        ("searching", True, False),
        ("not", False, True),
        ("asked", True, True),
        ("spare", True, True),
        ("spare-searching", True, False),
        *((name, True, True) for name in OWN),
    ],
)
def test_the_search_ends_where_every_weight_gets_a_gradient_and_only_there(folder, name, searches, views):
    for rank in range(2):
        found = json.loads((folder / f"report-{rank}.json").read_text())[name]
        assert found[:2] == [searches, views]
        assert ("spare.weight and 1 more got no gradient" in found[2]) is (name == "spare")
        assert ("unused weights are looked for: the loss is the user's own" in found[2]) is (name in OWN[:2])
        assert found[3] == ("compute_loss_func" if name == "later" else None)
