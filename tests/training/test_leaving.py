"""Who shares a process group lets go of it when one ends it; of one process, nobody has to."""

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_ext.training.leaving import release_group, share_group


class Holder:
    """Counts how often it was asked to let go."""

    def __init__(self):
        self.asked = 0

    def let_go(self):
        self.asked += 1


@pytest.fixture
def connect():
    """Makes this process the first of a number that are not there."""

    def begin(num_processes: int):
        distributed.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_all_that_share_a_group_let_go_and_those_that_are_gone_are_not_kept(connect):
    connect(2)
    first, second, gone = Holder(), Holder(), Holder()
    for holder in (first, second, gone, first):
        share_group(holder)
    del gone, holder
    release_group()
    assert (first.asked, second.asked) == (1, 1)


def test_who_shared_a_group_that_is_gone_is_left_alone_by_the_end_of_the_next(connect):
    connect(2)
    before, now = Holder(), Holder()
    share_group(before)
    distributed.destroy_process_group()
    connect(2)
    share_group(now)
    release_group()
    assert (before.asked, now.asked) == (0, 1)


@pytest.mark.parametrize("num_processes", [None, 1])
def test_of_one_process_the_end_of_one_touches_no_other(connect, num_processes):
    if num_processes:
        connect(num_processes)
    holder = Holder()
    share_group(holder)
    release_group()
    assert holder.asked == 0
