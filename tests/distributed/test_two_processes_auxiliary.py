"""Auxiliary terms and drawn points on two real processes: the weights of one, also after a kill in a step."""

import pytest
from auxiliary_runs import Fast, make_trainer
from closeness import largest
from locations import HELPERS
from ranks import run_on_ranks
from safetensors.torch import load_file

SCRIPT = HELPERS / "auxiliary_on_ranks.py"


def difference(one, other) -> float:
    assert one.keys() == other.keys()
    return largest((one[name] - other[name]).abs().max() for name in one)


@pytest.mark.nightly
def test_two_processes_agree_on_what_is_due_and_drawn_and_go_on_after_a_kill(tmp_path):
    alone = make_trainer(Fast, tmp_path / "alone")
    alone.train()
    alone = dict(alone.model.named_parameters())

    def train(name: str, kind: str = "Fast", killed_at: int | None = None):
        folder = tmp_path / name
        folder.mkdir()
        if killed_at is not None:
            run_on_ranks(SCRIPT, folder, kind, str(killed_at), is_killed=True)
        run_on_ranks(SCRIPT, folder, kind)
        first, second = (load_file(folder / f"weights-{rank}.safetensors") for rank in range(2))
        assert difference(first, second) == 0.0
        return first

    whole = train("whole")
    assert difference(whole, alone) < 1e-5
    for killed_at in (6, 7):  # the term is due in that step, or is not
        assert difference(whole, train(f"killed-{killed_at}", killed_at=killed_at)) == 0.0
    for broken in ("CountsBatches", "DrawsGlobally"):
        assert difference(train(broken, broken), alone) > 1e-4
