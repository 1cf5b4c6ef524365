"""The processes of a run, of one process: nothing waits, and errors are what they are on several."""

import errno
from types import SimpleNamespace

import pytest

from hf_ext.errors import ArgumentError, CheckpointError, DiskFailure
from hf_ext.training.team import Team


def make_team(**given) -> Team:
    alone = {"process_index": 0, "world_size": 1, "should_save": True, "device": "cpu", "output_dir": "out"}
    return Team(SimpleNamespace(**{**alone, **given}))


def refuse(number: int = errno.ENOSPC):
    raise OSError(number, "no room")


def test_one_process_is_the_main_one_and_agrees_with_itself():
    team = make_team()
    assert (team.rank, team.size, team.is_main, team.writes) == (0, 1, True, True)
    assert team.agree([True, False]) == [True, False]


def test_what_the_disk_refuses_is_described_and_any_other_error_is_raised_as_it_is():
    team, done = make_team(), []
    assert team.together(lambda: done.append(1), str) is None
    assert team.together(None, str) is None
    assert team.together(refuse, lambda error: f"full: {error.errno}") == f"full: {errno.ENOSPC}"
    with pytest.raises(ZeroDivisionError):
        team.together(lambda: 1 / 0, str)
    assert done == [1]


def test_loading_raises_what_the_disk_refuses():
    with pytest.raises(CheckpointError, match="full"):
        make_team().load_together(refuse, lambda error: "full")


def test_what_the_main_process_does_for_all_is_returned_or_raised():
    team = make_team()
    assert team.on_main(lambda: 3) == 3
    with pytest.raises(ArgumentError, match="not so"):
        team.on_main(lambda: (_ for _ in ()).throw(ArgumentError("not so")))
    with pytest.raises(DiskFailure):
        team.on_main(refuse)


def test_waiting_ends_when_the_main_process_waits_no_longer():
    left = [True, False]
    make_team().wait_while(lambda: left.pop(0))
    assert left == []
