"""kill -9 while a run saves, rotates and saves again: the same command goes on by itself and ends as if nothing was."""

import random
from dataclasses import replace

import pytest
from families import FAMILIES, SAVE_STEPS, WITH_WORKERS
from kill_cases import Bench, differences, draw_kills, run_with_kills
from killing import Job, Kill, attempt

KILLS_PER_RUN = 3
SAVED, NEXT = 2 * SAVE_STEPS, 3 * SAVE_STEPS


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


def make_job(bench: Bench, family: str, number: int) -> Job:
    """In turn: a fresh run; a new one where another saved the same steps; one that goes on from an older checkpoint."""
    if number % 3 == 0:
        return bench.job(family)
    if number % 3 == 1:
        return bench.copy(bench.earlier(family), seed=3, resume="no")
    job = bench.copy(bench.begun(family))
    return replace(job, resume=str(job.output_dir / f"checkpoint-{SAVE_STEPS}"))


def kill_at_random(bench: Bench, family: str, num_kills: int, seed: int) -> list[str]:
    """Kills runs of a family until there were `num_kills`; what went wrong."""
    rng, killed, problems = random.Random(f"{family} {seed}"), 0, []
    whole = bench.whole(family)[1]
    for number in range(3 * num_kills):  # some end before they are to be killed
        if killed >= num_kills:
            break
        job, kills = make_job(bench, family, number), draw_kills(rng, whole, min(KILLS_PER_RUN, num_kills - killed))
        if family in WITH_WORKERS and number == 0:  # one of them in a later epoch
            job, kills = bench.job(family), [Kill(at_step=SAVED + 2)]
        found = run_with_kills(bench, job, kills)
        killed, problems = killed + found[0], problems + found[1]
    assert killed == num_kills
    return problems


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_killed_at_random_goes_on_by_itself_and_ends_as_if_nothing_was(bench, family):
    assert kill_at_random(bench, family, num_kills=4, seed=0) == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_WORKERS])
def test_a_run_killed_forty_times_at_random_ends_as_if_nothing_was(bench, family):
    assert kill_at_random(bench, family, num_kills=40, seed=1) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "rank"), [(name, r) for name, f in FAMILIES.items() for r in range(f.num_ranks)])
def test_a_kill_before_any_file_operation_of_a_save_and_its_rotation_loses_nothing(bench, family, rank):
    moment = Kill(operation=10**9, after_step=NEXT, rank=rank)
    spared = attempt(bench.copy(bench.begun(family)), moment)
    assert (spared.end, spared.began_at) == ("spared", SAVED)
    assert spared.num_operations[rank] > 50 or rank > 0
    for number in range(1, spared.num_operations[rank] + 1):
        kill = Kill(operation=number, after_step=NEXT, rank=rank)
        assert run_with_kills(bench, bench.copy(bench.begun(family)), [kill]) == (1, [])


def test_a_run_with_another_seed_is_told_from_the_whole_one(bench):
    whole, _ = bench.whole("ESM regression")
    assert "other checkpoint-4/model.safetensors" in differences(bench.earlier("ESM regression"), whole)
