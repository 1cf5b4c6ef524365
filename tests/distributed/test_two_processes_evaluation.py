"""Two real processes evaluate as one does: the same rows, the same metrics, whatever the batch size."""

import json

import pytest
from evaluate_on_ranks import BATCHES, TASKS, measure
from locations import HELPERS
from ranks import run_on_ranks
from small_evaluations import make_rows

COMPARED = ("loss", "rows", "error", "order")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """What one process measures."""
    return measure(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two processes measured."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(HELPERS / "evaluate_on_ranks.py", folder)
    return [json.loads((folder / f"metrics-{rank}.json").read_text()) for rank in range(2)]


def same(one: dict[str, float], other: dict[str, float], prefixes: tuple[str, ...] = ("eval_",)) -> bool:
    keys = [f"{prefix}{name}" for prefix in prefixes for name in COMPARED]
    return all(one[key] == pytest.approx(other[key], rel=1e-6) for key in keys)


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_those_of_one_process_for_every_batch_size_and_stock_trainers_loss_is_not(alone, ranks, task):
    reference = alone["whole"][task]["37"]
    assert reference["eval_rows"] == 37.0
    for measured in (alone, *ranks):
        for batch in BATCHES:
            assert same(measured["whole"][task][str(batch)], reference)
    # When this fails, Trainer's loss no longer depends on the number of processes: drop ours.
    assert abs(ranks[0]["stock"][task]["eval_loss"] - reference["eval_loss"]) > 1e-4 * reference["eval_loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_a_stream_is_looked_at_row_by_row_once(alone, ranks, task):
    reference = alone["whole"][task]["37"]
    for measured in ranks:
        assert [same(found, reference) for found in measured["stream"][task].values()] == [True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_predictions_of_a_stream_stand_in_its_order(ranks, num_rows):
    labels = make_rows(num_rows)["labels"][:]
    for measured in ranks:
        assert measured["predicted"][str(num_rows)] == pytest.approx(labels)


@pytest.mark.nightly
def test_processes_that_read_different_rows_of_a_stream_are_told(ranks):
    for measured in ranks:
        assert "read different rows of the evaluation stream ([19, 18])" in measured["disagree"]


@pytest.mark.nightly
def test_training_rows_are_not_dispatched_by_the_main_process(ranks):
    assert all("leave Accelerate's dispatch_batches out" in measured["dispatch"] for measured in ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["training", "training stream"])
@pytest.mark.parametrize("task", TASKS)
def test_the_subset_and_the_rest_are_the_same_rows_as_in_one_process(alone, ranks, task, kind):
    for measured in ranks:
        first, last = measured[kind][task]
        expected_first, expected_last = alone["training"][task]
        assert (first["eval_rows"], last["eval_rows"], last["eval_full_rows"]) == (5.0, 5.0, 37.0)
        assert same(first, expected_first)
        assert same(last, expected_last, ("eval_", "eval_full_"))
        assert not same(last, {key.replace("full_", ""): value for key, value in last.items() if "full_" in key})


@pytest.mark.nightly
def test_binders_and_groups_are_those_of_one_process_on_a_subset_and_on_all_rows(alone, ranks):
    names = ("recall", "precision", "f1", "average_precision", "enrichment_1pct", "enrichment_5pct")
    names = (*names, "per_group_spearman", "num_defined_groups", "spearman")
    expected = alone["groups"][-1]
    assert (expected["eval_num_defined_groups"], expected["eval_full_num_defined_groups"]) == (3.0, 3.0)
    for measured in ranks:
        for prefix in ("eval_", "eval_full_"):
            found = {name: measured["groups"][-1][f"{prefix}{name}"] for name in names}
            wanted = {name: expected[f"{prefix}{name}"] for name in names}
            assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)
            assert found["per_group_spearman"] != pytest.approx(found["spearman"], rel=1e-3)
    assert expected["eval_per_group_spearman"] != pytest.approx(expected["eval_full_per_group_spearman"], rel=1e-3)


@pytest.mark.nightly
def test_a_loss_that_a_subclass_computes_trains_evaluates_and_predicts_as_in_stock_trainer(ranks):
    for measured in ranks:
        assert measured["overridden"]["seen"] == []
        assert {"losses", "grad_norms", "eval_losses", "test_loss", "weights"} <= set(measured["overridden"]["unseen"])
