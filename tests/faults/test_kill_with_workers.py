"""kill -9 of runs with data workers, and with dropout: they go on by themselves and end as if nothing was.

The count of the long run can be lowered (`HF_EXT_KILLS=20`), for a look at it.
"""

import os
import random
from collections import Counter

import pytest
from closing_line import record, say
from families import SAVE_STEPS, WITH_WORKERS
from kill_cases import Bench, Table, draw_kills, run_with_kills
from killing import Kill
from test_kill_training import KILLS_PER_RUN, make_job

NUM_KILLS = int(os.environ.get("HF_EXT_KILLS", "200"))
LATER = Kill(at_step=2 * SAVE_STEPS + 2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


def kill(bench: Bench, table: Table, family: str, num_kills: int, seed: int) -> list[str]:
    """Kills runs of a family at random until there were `num_kills`, of which the first is after an epoch."""
    rng = random.Random(f"{family} {seed}")
    row, problems, whole = table.row(family, "at random"), [], bench.whole(family)[1]
    if num_kills:
        problems += run_with_kills(bench, bench.job(family), [LATER], row)
    for number in range(3 * num_kills):  # some end before they are to be killed
        if row["kills"] >= num_kills:
            break
        kills = draw_kills(rng, whole, min(KILLS_PER_RUN, num_kills - row["kills"]))
        problems += run_with_kills(bench, make_job(bench, family, number), kills, row)
    assert row["kills"] == num_kills
    return problems


@pytest.mark.nightly
def test_a_run_with_workers_killed_in_a_later_epoch_ends_as_if_nothing_was(bench):
    row = Table().row("ESM regression, workers", "in a later epoch")
    assert run_with_kills(bench, bench.job("ESM regression, workers"), [LATER], row) == []


@pytest.mark.nightly
def test_of_two_hundred_kills_with_workers_all_end_identical(bench, request):
    table = Table()
    share, rest = divmod(NUM_KILLS, len(WITH_WORKERS))
    problems = []
    for number, family in enumerate(WITH_WORKERS):
        problems += kill(bench, table, family, share + (number < rest), seed=2)
    counts = sum(table.rows.values(), Counter())
    say(request, f"{table.line()}, with workers")
    if NUM_KILLS == 200:
        record("kill_with_workers", table.as_json())
    assert problems == []
    assert counts["kills"] == counts["resumed"] == counts["identical"] == NUM_KILLS
