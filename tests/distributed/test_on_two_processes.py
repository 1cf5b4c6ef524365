"""Two real processes do what one does: one launch makes all checks of `helpers/on_ranks.py`, two more fill a cache."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from equal_cases import COLUMNS, write_encoders
from hub_server import Fault, serve_hub
from locations import HELPERS
from on_ranks import BATCHES, TASKS, evaluates, make_few_antigens, stops_early
from ranks import run_on_ranks
from small_evaluations import make_rows

pytestmark = pytest.mark.nightly

SCRIPT = HELPERS / "on_ranks.py"
TOKEN = "hf_" + "canary" * 5 + "bird"


def read(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Where two processes made all checks, and the Hub that they pushed to."""
    folder = tmp_path_factory.mktemp("ranks")
    write_encoders(folder / "encoders")
    with pytest.MonkeyPatch.context() as patch, serve_hub(patch, TOKEN) as hub:
        patch.setenv("HF_TOKEN", TOKEN)
        hub.faults.append(Fault("POST", "me/broken/commit", 99, status=403))
        run_on_ranks(SCRIPT, folder, limit_s=600)
    return folder, hub


@pytest.fixture(scope="module")
def ranks(launched) -> list[dict]:
    """What each found, by check."""
    return read(launched[0])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """What one process measures."""
    return evaluates(tmp_path_factory.mktemp("alone"))


def same(one: dict[str, float], other: dict[str, float], *prefixes: str) -> bool:
    names = ("loss", "rows", "error", "order")
    keys = [f"{prefix}{name}" for prefix in prefixes or ("eval_",) for name in names]
    return all(one[key] == pytest.approx(other[key], rel=1e-6) for key in keys)


@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_those_of_one_process_for_every_batch_size_and_stock_trainers_loss_is_not(alone, ranks, task):
    reference = alone["whole"][task][-1]
    assert reference["eval_rows"] == 37.0
    for measured in (alone, *(rank["evaluates"] for rank in ranks)):
        assert [same(found, reference) for found in measured["whole"][task]] == [True] * len(BATCHES)
        assert [same(found, reference) for found in measured["stream"][task]] == [True, True]
    # When this fails, Trainer's loss no longer depends on the number of processes: drop ours.
    stock = ranks[0]["evaluates"]["stock"][task]["eval_loss"]
    assert abs(stock - reference["eval_loss"]) > 1e-4 * reference["eval_loss"]


@pytest.mark.parametrize("task", TASKS)
def test_the_subset_and_the_rest_are_the_same_rows_as_in_one_process(alone, ranks, task):
    expected_first, expected_last = alone["subset"][task][0]
    for first, last in (run for rank in ranks for run in rank["evaluates"]["subset"][task]):
        assert (first["eval_rows"], last["eval_rows"], last["eval_full_rows"]) == (5.0, 5.0, 37.0)
        assert same(first, expected_first)
        assert same(last, expected_last, "eval_", "eval_full_")
        assert not same(last, {key.replace("full_", ""): value for key, value in last.items() if "full_" in key})


def test_predictions_of_a_stream_stand_in_its_order_and_streams_that_differ_are_told(ranks):
    for rank in ranks:
        for num_rows, found in rank["predicts_a_stream"].items():
            assert found == pytest.approx(make_rows(int(num_rows))["labels"][:])
        differ, dispatch = rank["refuses_streams_that_differ_and_dispatch"]
        assert "read different rows of the evaluation stream ([19, 18])" in differ
        assert "leave Accelerate's dispatch_batches out" in dispatch


def test_a_loss_that_a_subclass_computes_trains_evaluates_and_predicts_as_in_stock_trainer(ranks):
    for rank in ranks:
        found = rank["takes_a_loss_of_the_users"]
        assert found["seen"] == []
        assert {"losses", "grad_norms", "eval_losses", "test_loss", "weights"} <= set(found["unseen"])


def test_two_processes_decide_and_stop_as_one_does(ranks, tmp_path):
    alone = json.loads(json.dumps(stops_early(tmp_path)))
    assert alone[0] == 3
    assert [rank["stops_early"] for rank in ranks] == [alone, alone]


def test_padding_that_one_process_sees_ends_all(ranks):
    words = (
        r"packing: the loss of step \d reads positions that the attention mask leaves out .* weights were not touched"
    )
    assert all(re.match(words, rank["sees_a_loss_that_reads_padding"]) for rank in ranks)


def test_a_step_for_which_one_process_has_no_room_has_the_gradient_of_one_that_fits_and_none_waits(ranks):
    """In the forward or the backward pass, before or while gradients are sent; all then compute in as many parts."""
    for found in (rank["runs_out_of_memory"] for rank in ranks):
        assert found.pop("rows") == [3, 4]  # the most that fit on both
        assert found.pop("continued") == [True, False]  # bytes of the run in parts, not of the whole one
        assert len(found) == 10
        assert {name: parts for name, (_, parts) in found.items()} == {
            name: [4 if name.endswith("one") else 2] for name in found
        }
        assert max(distance for distance, _ in found.values()) < 1e-12


def test_a_label_that_one_process_sees_leaves_the_step_out_on_both(ranks):
    first, second = (rank["leaves_steps_out"] for rank in ranks)
    left, unchanged, resumed, is_same = first
    assert len(left) == 4  # once an epoch
    assert left == unchanged == resumed
    assert is_same
    assert second == first


def test_both_processes_hear_how_a_push_went(ranks, launched):
    hub = launched[1]
    first, second = (rank["pushes"] for rank in ranks)
    assert first == second
    assert first["good"] == hub.repositories["me/good"].branches["main"]
    assert "was not pushed to me/broken" in first["broken"]
    assert hub.count("POST", "me/good/commit") == len(hub.repositories["me/good"].messages) - 1  # one process talks


def test_parts_computed_again_end_in_the_weights_of_a_run_that_keeps_all(ranks):
    for rank in ranks:
        found = rank["recomputes"]
        assert found.pop("anew") > 1e-4  # what the others would be if dropout were drawn anew
        assert max(found.values()) < 1e-6
        assert len(found) == 5


def test_the_learning_rate_follows_the_rows_of_all_processes(ranks):
    # 4 rows x 2 passes x 2 processes are 16, 8 times the 2 that 0.001 was chosen for.
    words = "learning_rate 0.001 x 8 = 0.008: 16 rows per step over 2, linear"
    assert [rank["scales_the_rate"] for rank in ranks] == [[words, [0.008, 0.008]]] * 2


def shards(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("rows-*")}


def test_each_sequence_is_encoded_once_in_the_world_and_the_work_is_shared(ranks, launched):
    rows = make_few_antigens(launched[0] / "encoders")[2]
    distinct = {name: set(rows[name][:]) for name in COLUMNS}
    reports = [rank["fills_the_cache"] for rank in ranks]
    for name, sequences in distinct.items():
        both = [Counter(report["counts"].get(name, {})) for report in reports]
        assert both[0] + both[1] == Counter(dict.fromkeys(sequences, 1))
        assert len(sequences) < 64 or min(own.total() for own in both) > len(sequences) / 4
    assert len(distinct["antigen"]) == 3  # one shard: the second process waits
    assert "antigen" not in reports[1]["counts"]
    assert [rank["finds_the_cache_full"] for rank in ranks] == [{"counts": {}, "num_encoded": 0}] * 2


def test_after_a_kill_what_was_missing_is_encoded_once_into_the_same_files(ranks, launched, tmp_path):
    shutil.copytree(launched[0] / "encoders", tmp_path / "encoders")
    run_on_ranks(SCRIPT, tmp_path, "dies_filling_the_cache", is_killed=True)
    whole, stored = shards(launched[0] / "cache"), shards(tmp_path / "cache")
    assert 0 < len(stored) < len(whole)
    run_on_ranks(SCRIPT, tmp_path, "fills_the_cache")
    encoded = [report["fills_the_cache"]["num_encoded"] for report in read(tmp_path)]
    assert 0 < encoded[0] == encoded[1] < ranks[0]["fills_the_cache"]["num_encoded"]
    assert shards(tmp_path / "cache") == whole


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator do processes lose each other")
def test_processes_without_an_accelerator_train_together_and_leave_no_model_and_no_thread(ranks):
    for rank in ranks:
        found = rank["leaves_nothing"]
        assert (found["world"], found["use_cpu"]) == (2, [True, False])
        assert "accelerate would run DDP and say nothing" in found["refused"]
        assert (found["wrapped"], found["left"]) == ([True, True], [False, False, False])
        assert found["threads"][0] > 0  # so that the next line can fail
        assert found["threads"][1] == 0
