"""The processes of a run, of one process: nothing waits, and errors are what they are on several."""

import errno
from types import SimpleNamespace

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_ext.errors import ArgumentError, DiskFailure
from hf_ext.processes.team import Team, release_group, share_group


def make_team(**given) -> Team:
    alone = {"process_index": 0, "world_size": 1, "should_save": True, "device": "cpu", "output_dir": "out"}
    return Team(SimpleNamespace(args=SimpleNamespace(**{**alone, **given})))


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


def test_what_the_main_process_does_for_all_is_returned_or_raised():
    team = make_team()
    assert team.on_main(lambda: 3) == 3
    with pytest.raises(ArgumentError, match="not so"):
        team.on_main(lambda: (_ for _ in ()).throw(ArgumentError("not so")))
    with pytest.raises(DiskFailure):
        team.on_main(refuse)


class Holder:
    """Counts how often it was asked to let go."""

    asked = 0

    def let_go(self):
        self.asked += 1


@pytest.mark.parametrize(("num_processes", "asked"), [(None, 0), (1, 0), (2, 1)])
def test_all_that_share_the_group_of_several_processes_let_go_of_it_once(num_processes, asked):
    first, second, gone = Holder(), Holder(), Holder()
    if num_processes:
        distributed.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    try:
        for holder in (first, second, gone, first):
            share_group(holder)
        del gone, holder
        release_group()
        release_group()
        assert (first.asked, second.asked) == (asked, asked)
    finally:
        if num_processes:
            distributed.destroy_process_group()
