"""However a run with data workers ends, its process ends too: in time, with its status and its message."""

import itertools

import pytest
from ending_process import Endings

# What ends it: (status, what the last lines say).
ENDS = {
    "SIGTERM": (75, "TrainingStopped: received SIGTERM: saved checkpoint-3 and stopped."),
    "SIGINT": (75, "TrainingStopped: received SIGINT: saved checkpoint-3 and stopped."),
    "SIGHUP": (75, "TrainingStopped: received SIGHUP: saved checkpoint-3 and stopped."),
    "evaluation": (75, "TrainingStopped: received SIGTERM: saved checkpoint-3 and stopped."),
    "max_hours": (75, "TrainingStopped: max_hours"),
    "NaN": (65, "NotFiniteError: "),
    "memory": (69, "MemoryExhausted: no memory"),
    "worker": (71, "DataWorkerDied: DataLoader worker (pid"),
    "disk": (74, "DiskFailure: "),
    "bug": (1, "KeyError: 'a bug'"),
}
METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(scope="module")
def endings():
    """Cases are forked from one process, so that none pays for imports."""
    process = Endings()
    yield process
    process.close()


def check(endings, folder, name, *given):
    status, error, seconds, left = endings.run(folder, name, *given)
    assert (status, left) == (ENDS[name][0], []), (given, error[-3000:])
    assert ENDS[name][1] in error, (given, error[-3000:])
    assert seconds < 20, given  # 1 to 3 on a quiet machine; workers used to keep it for ever


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["SIGTERM", "NaN", "worker", "disk", "bug"])
def test_a_run_with_a_data_worker_ends_with_its_status_and_message(endings, tmp_path, name):
    check(endings, tmp_path / name, name, 1, "fork")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENDS)
def test_so_it_does_without_workers_and_with_any_kind_of_them(endings, tmp_path, name):
    if name != "worker":
        check(endings, tmp_path / "none", name, 0)
    for given in itertools.product((1, 2), METHODS):
        check(endings, tmp_path / "-".join(map(str, given)), name, *given)
