"""The record of a run: strict JSON, no tokens, time over all sessions."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from hf_ext.arguments import FastArgumentParser
from hf_ext.errors import DataError
from hf_ext.reporting import (
    CommonRecord,
    PlanRecord,
    RunClockCallback,
    RunRecord,
    Throughput,
    from_json,
    record_run,
    to_json,
)
from hf_ext.reporting.record import ModelRecord
from hf_ext.text import write_json
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
SECRET = "hf_" + "a" * 34


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layer.bias.requires_grad_(False)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


TASK = {"task": "mine", "model": {"loss": "mse"}, "stage": 2}  # what a task adds
STARTED = {  # how the token is given -> how the program was started, and what to type to do so again
    "apart": (["--hub_token", SECRET], "/home/ann/clone/recipes/mlm.py", "accelerate launch --quiet recipes/mlm.py"),
    "joined": ([f"--hub_token={SECRET}"], "hf-ext train", "hf-ext train"),
}


@pytest.fixture(scope="module", params=STARTED)
def recorded(request, tmp_path_factory):
    token, program, _ = STARTED[request.param]
    folder = tmp_path_factory.mktemp("run")
    parser = FastArgumentParser(FastTrainingArguments)
    words = ["--output_dir", str(folder), *token, "--max_steps", "2"]
    (args,) = parser.parse_args_into_dataclasses([*words, "--save_strategy", "no", "--report_to", "none"])
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 4
    trainer = FastTrainer(Line(), args, train_dataset=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program])
        return record_run(trainer, trainer.train(), {"loss": "mse"}, parser.origins, parser.arguments, TASK)


def test_the_command_repeats_the_run_and_no_token_is_anywhere(recorded, request):
    start = STARTED[request.node.callspec.params["recorded"]][2]
    command = f"{start} --output_dir {recorded.settings['output_dir']}"
    assert recorded.command == f"{command} --max_steps 2 --save_strategy no --report_to none"
    assert recorded.settings["hub_token"] == "<set>"
    assert SECRET not in json.dumps(to_json(recorded), default=str)


def test_weights_versions_time_and_money_are_told(recorded):
    assert recorded.model == ModelRecord("Line", 2, 1, own={"loss": "mse"})
    assert recorded.environment.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    costs = recorded.costs
    assert costs.wall_s > costs.train_s > 0
    assert (costs.num_sessions, costs.memory_of) == (1, "process")


def test_heads_with_trainers_of_their_own_cost_what_their_training_took(tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = FastTrainer(Line(), args)
    hour = SimpleNamespace(metrics={"train_runtime": 3600.0})  # most of it in an earlier process
    costs = record_run(trainer, hour, {}, {}, [], {}).costs
    assert (costs.train_s, costs.wall_s, costs.num_sessions) == (3600.0, 3600.0, None)


def test_local_data_and_models_are_absolute_and_hub_ids_and_words_that_end_in_token_stay(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"dataset_name": "data/pairs", "encoders": ["facebook/esm2_t6_8M_UR50D", "data"], "init_head_from": None}
    trainer = FastTrainer(Line(), FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    trained = SimpleNamespace(metrics={"train_runtime": 1.0})
    words = ["--output_dir", "my_token", "--hub_token", SECRET, "--seed", "1"]
    record = record_run(trainer, trained, given, dict.fromkeys(given, "command line"), words, {})
    assert record.command.endswith(" --output_dir my_token --seed 1")
    assert record.settings == {
        "dataset_name": str(tmp_path / "data" / "pairs"),
        "encoders": ["facebook/esm2_t6_8M_UR50D", str(tmp_path / "data")],
        "init_head_from": None,
    }


def test_a_resumed_clock_counts_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    first = RunClockCallback()
    first.on_train_begin(None, TrainerState(), TrainerControl())
    now[0] = 105.0
    stored = first.state()
    now[0] = 300.0  # after the last checkpoint, lost with the process
    second = RunClockCallback()
    second.on_train_begin(None, TrainerState(), TrainerControl())
    second.load(stored)
    now[0] = 302.0
    second.on_train_end(None, TrainerState(), TrainerControl())
    assert second.seconds == 7.0
    assert second.num_sessions == 2


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("-inf"), 1.5], 3: (None, True)})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": None,
        "b": [None, 1.5],
        "3": [None, True],
    }


def test_a_record_that_was_written_is_read_back_equal_and_its_keys_keep_their_order(recorded, tmp_path):
    written = to_json(recorded)
    assert [*written] == [
        *("format", "created", "command", "seed", "trainer", "model", "train", "best", "settings", "settings_from"),
        *("environment", "costs", "task", "stage"),
    ]
    assert written["model"] == {"class": "Line", "num_parameters": 2, "num_trainable": 1, "loss": "mse"}
    write_json(tmp_path / "all_results.json", written)
    stored = json.loads((tmp_path / "all_results.json").read_text())
    as_texts = replace(recorded, settings=stored["settings"])  # what JSON has no form for
    assert from_json(CommonRecord, stored) == as_texts
    run = from_json(RunRecord, stored)
    assert (run.task, run.own) == ("mine", {"stage": 2})  # what is not shared by tasks is kept by name


def test_keys_of_another_version_are_passed_over_and_missing_ones_have_their_defaults():
    plan = from_json(PlanRecord, {"decisions": [{"name": "lora", "colour": "blue"}, {}], "mood": 1})
    assert [one.name for one in plan.decisions] == ["lora", ""]
    assert not from_json(RunRecord, {"data": {}, "test": None}).data
    assert from_json(RunRecord, None) == RunRecord()
    assert from_json(Throughput, {"steps_per_epoch": None}) == Throughput()
    assert from_json(RunRecord, {"data": {"source": None}}).is_demo  # null is said of generated data
    numbers = from_json(RunRecord, {"test": {"model": {"perplexity": 8}, "unigram": {"perplexity": 16.5}}}).test
    assert {name: both["perplexity"].shown for name, both in numbers.scores.items()} == {
        "model": "8",
        "unigram": "16.500",
    }
    assert [*numbers.baselines] == ["unigram"]


def test_a_value_of_another_type_is_left_out_by_file_and_key(caplog):
    stored = {
        "alarms": [3, {"step": 2, "alarms": ["x"]}],
        "data": {"sizes": "all", "split": {"seed": 1}},
        "verdict": [],
    }
    run = from_json(RunRecord, stored, "runs/a/all_results.json")
    assert [record.getMessage() for record in caplog.records] == [
        "runs/a/all_results.json, alarms, 1 is left out: an object is needed, int is there.",
        "runs/a/all_results.json, verdict is left out: an object is needed, list is there.",
        "runs/a/all_results.json, data, sizes is left out: an object is needed, str is there.",
    ]
    assert ([one.step for one in run.alarms], run.data.split.seed, run.data.sizes) == ([2], 1, {})


@pytest.mark.parametrize("state", [{"task": "none"}, {"columns": ["a"]}])
def test_a_record_of_a_kind_that_is_not_known_is_refused_in_one_line(state):
    with pytest.raises(DataError, match="no kind of label"):
        from_json(RunRecord, {"label_kind": state}, "all_results.json").kind  # noqa: B018
    assert from_json(RunRecord, {}, "all_results.json").kind.is_one_number
