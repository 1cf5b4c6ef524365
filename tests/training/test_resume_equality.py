"""A run that was killed and resumed is the run that was not: weights, logged values, evaluations and rows seen."""

import closing_line
import pytest
from resuming_runs import NUM_ROWS, Case, Runs, differences

EVALUATING = (("eval_strategy", "steps"), ("eval_steps", 2))
STOPPING = (
    *EVALUATING[:1],
    ("eval_steps", 3),
    ("save_steps", 3),
    ("patience", 2),
    ("metric_for_best_model", "loss"),
    ("load_best_model_at_end", True),
    ("learning_rate", 0.1),
)
LOGGING = (("logging_steps", 3),)  # the step saved falls between two logs
WORKERS, ACCUMULATION = (0, 2), (1, 2, 5)
LOADING = (("speedups", ("data_loading",)), *EVALUATING)
CACHED = (("speedups", ("data_loading", "embedding_cache")), *EVALUATING)


def over(
    data: str, task: str = "masked", accumulation=ACCUMULATION, save_step: int = 0, given=(), workers=WORKERS
) -> list[Case]:
    return [Case(data, task, number, steps, save_step, given) for steps in accumulation for number in workers]


CASES = [
    *over("map"),
    *over("stream"),
    *over("stream", accumulation=(1, 2), save_step=3),  # in the first pass
    *over("stream", accumulation=(5,), save_step=1),
    *over("shuffled stream"),
    *over("packed"),
    *over("token budget"),
    *over("grouped"),
    *over("cached", "regression"),
    *over("map", "lora", (1, 2)),
    *over("grouped", "lora", (2,)),
    *over("map", given=EVALUATING, accumulation=(2,)),
    *over("stream", "lora", (2,)),
    *over("map", accumulation=(2,), save_step=4),  # the short last step of the first epoch
    *over("cached", "regression", (1,), 6, STOPPING),
    *over("map", given=LOGGING, accumulation=(2,)),
    *over("stream", given=LOGGING, accumulation=(1,)),
    *over("map", "lora", (1,), given=LOADING, workers=(1, 2)),
    *over("map", "lora", (2,), save_step=4, given=LOADING, workers=(2,)),  # the last step of the first epoch
    *over("grouped", "lora", (2,), given=LOADING, workers=(2,)),
    *over("stream", "lora", (1,), given=LOADING, workers=(2,)),
    *over("cached", "regression", (1,), given=CACHED, workers=(1, 2)),
    *over("token budget", given=LOADING, accumulation=(2,), workers=(2,)),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_affinity, demo_rows):
    return Runs(tmp_path_factory.mktemp("runs"), make_affinity, demo_rows)


@pytest.fixture(scope="module")
def tally(request):
    """Counts of cases, printed at the end."""
    with closing_line.tally(request, "resume equality", cases=0, identical=0) as counts:
        yield counts


@pytest.mark.sampled(32)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_killed_and_resumed_run_is_the_run_that_was_not_killed(case, runs, tally, blocked_in_float32):
    tally["cases"] += 1
    whole = runs.whole(case)
    killed = runs.interrupt(case)
    resumed = runs.resume(case, killed)
    assert whole.state.global_step > case.step + 1
    assert differences(resumed, whole) == []
    seen = {**{step: rows for step, rows in killed.seen.items() if step < case.step}, **resumed.seen}
    assert min(resumed.seen) == case.step
    assert seen == whole.seen
    in_order = [row for step in sorted(seen) for row in seen[step]]
    passes = [in_order[i : i + NUM_ROWS] for i in range(0, len(in_order), NUM_ROWS)]
    assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in passes[: len(in_order) // NUM_ROWS])
    tally["identical"] += 1


def test_the_suite_has_as_many_cases_as_it_says():
    assert len(set(CASES)) == len(CASES) >= 60


def test_the_comparison_sees_a_resume_that_forgets_the_data(runs, blocked_in_float32):
    case = Case("map")
    lost = runs.resume(case, runs.interrupt(case), ignore_data_skip=True)
    assert "weights" in differences(lost, runs.whole(case))
