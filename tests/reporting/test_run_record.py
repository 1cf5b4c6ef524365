"""The record of a run: strict JSON, no tokens, time over all sessions."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.reporting.run_record import RunClockCallback, record_run, write_json
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SECRET = "hf_" + "a" * 34


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layer.bias.requires_grad_(False)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


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
        return record_run(trainer, trainer.train(), {"loss": "mse"}, parser.origins, parser.arguments)


def test_the_command_repeats_the_run_and_no_token_is_anywhere(recorded, request):
    start = STARTED[request.node.callspec.params["recorded"]][2]
    command = f"{start} --output_dir {recorded['settings']['output_dir']}"
    assert recorded["command"] == f"{command} --max_steps 2 --save_strategy no --report_to none"
    assert recorded["settings"]["hub_token"] == "<set>"
    assert SECRET not in json.dumps(recorded, default=str)


def test_weights_versions_time_and_money_are_told(recorded):
    assert recorded["model"] == {"class": "Line", "num_parameters": 2, "num_trainable": 1}
    assert recorded["environment"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    costs = recorded["costs"]
    assert costs["wall_s"] > costs["train_s"] > 0
    assert (costs["num_sessions"], costs["memory_of"]) == (1, "process")


def test_heads_with_trainers_of_their_own_cost_what_their_training_took(tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = FastTrainer(Line(), args)
    hour = SimpleNamespace(metrics={"train_runtime": 3600.0})  # most of it in an earlier process
    costs = record_run(trainer, hour, {}, {}, [])["costs"]
    assert (costs["train_s"], costs["wall_s"], costs["num_sessions"]) == (3600.0, 3600.0, None)


def test_local_data_and_models_are_absolute_and_hub_ids_and_words_that_end_in_token_stay(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"dataset_name": "data/pairs", "encoders": ["facebook/esm2_t6_8M_UR50D", "data"], "init_head_from": None}
    trainer = FastTrainer(Line(), FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    trained = SimpleNamespace(metrics={"train_runtime": 1.0})
    words = ["--output_dir", "my_token", "--hub_token", SECRET, "--seed", "1"]
    record = record_run(trainer, trained, given, dict.fromkeys(given, "command line"), words)
    assert record["command"].endswith(" --output_dir my_token --seed 1")
    assert record["settings"] == {
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
