"""`--push_to_hub` from a Trainer, over a real socket to a server that speaks the Hub's API and can misbehave."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
from datasets import Dataset
from hub_server import Fault, HubServer, find_token, serve_hub
from huggingface_hub import HfApi
from locations import HELPERS
from miniature_esm import make_esm
from peft import LoraConfig, get_peft_model
from transformers import EsmForSequenceClassification, TrainerCallback

from hf_ext.errors import ArgumentError, TrainingStopped
from hf_ext.hub import HubError, push, pusher
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

TOKEN = "hf_" + "canary" * 5 + "bird"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(push, "WAITS_S", (0.01,))
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


@pytest.fixture
def make_trainer(tmp_path: Path, hub: HubServer) -> Callable[..., FastTrainer]:
    """A tiny classifier of 20 rows; 4 steps, saved every second one, the older checkpoint deleted."""

    def make(model: Any = None, **given: Any) -> FastTrainer:
        model = model or make_esm(EsmForSequenceClassification)
        torch.manual_seed(1)
        ids = torch.randint(4, 24, (20, 9)).tolist()
        rows = Dataset.from_dict({"input_ids": ids, "labels": [i % 2 for i in range(20)]})
        args = FastTrainingArguments(
            **{
                "output_dir": str(tmp_path / "run"),
                "per_device_train_batch_size": 2,
                "max_steps": 4,
                "save_steps": 2,
                "save_total_limit": 1,
                "logging_steps": 1,
                "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": True,
                "push_to_hub": True,
                "hub_model_id": "me/x",
                "hub_strategy": "end",
                "hub_token": TOKEN,
                **given,
            }
        )
        return FastTrainer(model, args, train_dataset=rows, eval_dataset=rows)

    return make


def train_to_end(trainer: FastTrainer) -> None:
    """As a recipe does."""
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub()
    trainer.end()


# What leaves


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", ["frozen", "lora", "full"])
def test_of_an_affinity_model_no_token_no_pickle_and_no_record_leaves(
    hub: HubServer,
    make_affinity: Callable,
    demo_encoders: Any,
    demo_rows: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
    training: str,
) -> None:
    caplog.set_level(logging.INFO)
    model, collator = make_affinity(antibody=training, antigen=training)
    args = FastTrainingArguments(
        output_dir=str(tmp_path / "run"),
        speedups=["embedding_cache"] if training == "frozen" else [],
        embedding_cache_dir=str(tmp_path / "cache"),
        max_steps=1,
        save_steps=1,
        push_to_hub=True,
        hub_token=TOKEN,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = FastTrainer(model, args, data_collator=collator, train_dataset=demo_rows, eval_dataset=demo_rows)
    train_to_end(trainer)
    repository = hub.repositories["me/run"]
    assert repository.private
    assert {"README.md", "config.json", "model.safetensors", "inputs.json"} < set(repository.files)
    assert f"{demo_encoders[0]}, {demo_encoders[1]}, known to this machine alone" in caplog.text
    every = {name for files in repository.commits.values() for name in files}
    assert not [name for name in every if name.endswith((".bin", ".pt", ".pth", ".pkl")) or "optimizer" in name]
    assert not {"training_args.json", "trainer_state.json", "run.log", "rank_0.json"} & every
    assert find_token(TOKEN, hub, tmp_path, caplog.text, *capfd.readouterr()) == []


@pytest.mark.nightly
def test_a_classifier_and_adapters_on_one_come_back_with_a_card_that_the_hub_takes(
    make_trainer: Callable, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train_to_end(make_trainer(hub_model_id="me/full"))
    make_esm(EsmForSequenceClassification).save_pretrained(tmp_path / "base", save_original_format=False)
    base = EsmForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    train_to_end(make_trainer(adapted, hub_model_id="me/adapters", output_dir=str(tmp_path / "run2")))
    assert "model.safetensors" in hub.repositories["me/full"].files
    adapters = hub.repositories["me/adapters"].files
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(adapters)
    assert b"[More Information Needed]" not in adapters["README.md"]
    assert b"base_model:" not in adapters["README.md"]  # a path, which the Hub refuses
    assert f"names {tmp_path / 'base'}, known to this machine alone" in caplog.text


def test_a_card_that_is_there_is_pushed_as_it_is(make_trainer: Callable, hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    (tmp_path / "run" / "README.md").write_text("---\nlibrary_name: hf_ext\n---\n# Mine\n")
    (tmp_path / "run" / "report.html").write_text("<p>report</p>")
    commit = trainer.push_to_hub("Done")
    assert hub.repositories["me/x"].files["README.md"].endswith(b"# Mine\n")
    assert hub.repositories["me/x"].messages[-1] == "Done"
    assert (trainer.hub_model_id, commit.oid) == ("me/x", hub.repositories["me/x"].branches["main"])
    assert "report.html" in hub.repositories["me/x"].files


# What the strategies push


def messages(hub: HubServer) -> list[str]:
    return hub.repositories["me/x"].messages[1:]


class WaitForPush(TrainerCallback):
    """Training that is as slow as its pushes."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        while any(thread.name == "hub-push" for thread in threading.enumerate()):
            time.sleep(0.01)


def test_end_pushes_nothing_before_the_end(make_trainer: Callable, hub: HubServer) -> None:
    trainer = make_trainer()
    trainer.train()
    assert messages(hub) == []
    assert hub.count("POST", "preupload") == 0


def test_every_save_pushes_each_checkpoint_while_training_goes_on(make_trainer: Callable, hub: HubServer) -> None:
    trainer = make_trainer(hub_strategy="every_save", max_steps=4)
    trainer.add_callback(WaitForPush())
    trainer.train()
    assert messages(hub) == [f"Training in progress, checkpoint-{step}" for step in (2, 4)]
    assert set(hub.repositories["me/x"].files) == {".gitattributes", "config.json", "model.safetensors"}


def test_checkpoint_pushes_what_a_run_elsewhere_continues_from(
    make_trainer: Callable, hub: HubServer, tmp_path: Path
) -> None:
    whole = make_trainer(output_dir=str(tmp_path / "whole"), push_to_hub=False)
    whole.train()
    first = make_trainer(hub_strategy="checkpoint", max_steps=4, save_steps=3)
    first.add_callback(StopAfter(3))
    with pytest.raises(TrainingStopped):
        first.train()
    files = set(hub.repositories["me/x"].files)
    assert {"model.safetensors", "last-checkpoint/optimizer.pt", "last-checkpoint/manifest.json"} < files
    assert find_token(TOKEN, hub, tmp_path) == []
    shutil.rmtree(tmp_path / "run")
    HfApi(hub.url, token=TOKEN).snapshot_download(
        "me/x", local_dir=tmp_path / "elsewhere", allow_patterns="last-checkpoint/*"
    )
    second = make_trainer(hub_strategy="checkpoint", resume=str(tmp_path / "elsewhere" / "last-checkpoint"))
    second.train()
    ours, theirs = second.model.state_dict(), whole.model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert json.loads(hub.repositories["me/x"].files["last-checkpoint/manifest.json"])["step"] == 4


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), 15)


def test_of_a_checkpoint_that_holds_only_what_trains_the_model_is_pushed_at_the_end(
    make_trainer: Callable, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_esm(EsmForSequenceClassification).save_pretrained(tmp_path / "base", save_original_format=False)
    model = EsmForSequenceClassification.from_pretrained(tmp_path / "base")
    for parameter in model.esm.parameters():
        parameter.requires_grad = False
    trainer = make_trainer(model, hub_strategy="every_save", max_steps=2)
    trainer.train()
    assert messages(hub) == []
    assert "checkpoint-2 holds no weights to push" in caplog.text
    trainer.push_to_hub()
    trainer.end()
    HfApi(hub.url, token=TOKEN).snapshot_download("me/x", local_dir=tmp_path / "fresh")
    again = EsmForSequenceClassification.from_pretrained(tmp_path / "fresh").state_dict()
    assert [name for name, value in trainer.model.state_dict().items() if not torch.equal(again[name], value)] == []


@pytest.mark.parametrize("always", [False, True])
def test_a_save_during_a_push_is_left_to_the_next_one_unless_every_one_is_wanted(
    make_trainer: Callable, hub: HubServer, tmp_path: Path, always: bool
) -> None:
    def wait_for_all() -> None:
        wait_for((tmp_path / "run" / "checkpoint-4").is_dir)
        time.sleep(0.2)  # its push is asked for right after

    limit, strategy = (None, "all_checkpoints") if always else (1, "every_save")
    trainer = make_trainer(hub_strategy=strategy, save_steps=1, save_total_limit=limit, hub_always_push=always)
    hub.faults.append(Fault("POST", "preupload", call=wait_for_all))
    trainer.train()
    assert hub.faults[0].times == 0
    expected = (1, 2, 3, 4) if always else (1, 4)
    assert messages(hub) == [f"Training in progress, checkpoint-{step}" for step in expected]
    left = {path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")}
    assert left == ({f"checkpoint-{step}" for step in expected} if always else {"checkpoint-4"})
    if always:
        assert {f"checkpoint-{step}/manifest.json" for step in expected} < set(hub.repositories["me/x"].files)


def wait_for(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_checkpoint_stays_while_it_is_sent_on_top_of_the_budget(
    make_trainer: Callable, hub: HubServer, tmp_path: Path
) -> None:
    given = {"hub_strategy": "every_save", "save_steps": 1, "max_steps": 3}
    with pytest.raises(ArgumentError, match="save_total_size_gb") as caught:
        make_trainer(save_total_size_gb=1e-6, **given).train()
    needed = re.search(r"--save_total_size_gb ([0-9.]*[0-9])", str(caught.value))
    assert needed is not None, str(caught.value)
    trainer = make_trainer(save_total_size_gb=float(needed[1]), **given)
    stands = [tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2, 3)]
    seen: list[list[bool]] = []

    def look() -> None:
        wait_for(lambda: stands[2].exists() and not stands[1].exists())
        seen.append([path.exists() for path in stands])

    hub.faults.append(Fault("POST", "preupload", call=look))
    trainer.train()
    assert seen == [[True, False, True]]  # the first one is being sent
    assert [path.exists() for path in stands] == [False, False, True]


def test_a_second_training_pushes_its_checkpoints_though_their_names_are_the_same(
    make_trainer: Callable, hub: HubServer
) -> None:
    trainer = make_trainer(hub_strategy="every_save", save_steps=4)
    trainer.train()
    trainer.train()
    assert messages(hub) == ["Training in progress, checkpoint-4"] * 2


# Failures that a run may meet


def test_no_right_to_write_is_found_before_training(make_trainer: Callable, hub: HubServer) -> None:
    make_trainer()
    hub.can_write = False
    with pytest.raises(HubError, match=r"me/x on the Hub cannot be written to, after 1 attempt.*403"):
        make_trainer()
    hub.token = "hf_another"
    with pytest.raises(HubError, match=r"cannot be written to, after 1 attempt.*401") as caught:
        make_trainer()
    assert TOKEN not in str(caught.value)


def test_a_public_repository_is_found_before_training(make_trainer: Callable, hub: HubServer) -> None:
    make_trainer(hub_private_repo=False)
    with pytest.raises(HubError, match="me/x is public and the push is private"):
        make_trainer()


def test_no_hub_and_no_token_are_found_before_training(
    make_trainer: Callable, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match="There is no token for the Hub"):
        make_trainer(hub_token=None)
    hub.faults.append(Fault("POST", "repos/create", 99, cut=True))
    with pytest.raises(HubError, match=r"cannot be written to, after 2 attempt"):
        make_trainer()


def test_a_503_for_good_is_an_error_at_the_end_with_the_command_that_repeats_it(
    make_trainer: Callable, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(hub_strategy="every_save")
    hub.faults.append(Fault("POST", "commit", 99, status=503))
    trainer.train()
    assert trainer.state.global_step == 4
    assert "checkpoint-4 is not on the Hub" in caplog.text
    trainer.save_model()
    with pytest.raises(HubError, match=f"python -m hf_ext.hub {tmp_path / 'run'} me/x"):
        trainer.push_to_hub()
    with pytest.raises(HubError, match=f"python -m hf_ext.hub {tmp_path / 'run'} me/x"):
        trainer.end()  # of a script that only saved
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert find_token(TOKEN, hub, tmp_path, caplog.text) == []


def test_the_last_checkpoint_is_made_up_for_at_the_end(make_trainer: Callable, hub: HubServer) -> None:
    trainer = make_trainer(hub_strategy="every_save", save_steps=4)
    hub.faults.append(Fault("POST", "commit", 2, status=503))
    trainer.train()
    assert messages(hub) == ["Training in progress, checkpoint-4"]
    trainer.end()


def test_a_hub_that_hangs_holds_the_end_of_training_up_for_a_bounded_time(
    make_trainer: Callable, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(pusher, "END_WAIT_S", 0.5)
    hub.faults.append(Fault("POST", "commit", delay_s=30.0))
    trainer = make_trainer(hub_strategy="every_save")
    trainer.train()
    assert trainer.state.global_step == 4
    assert "What is being sent to the Hub was not there after" in caplog.text
    with pytest.raises(HubError, match="did not end within"):
        trainer.end()


def test_a_stop_does_not_wait_for_a_hub_that_hangs(
    make_trainer: Callable, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(pusher, "GRACE_S", 0.5)
    hub.faults.append(Fault("POST", "commit", 99, delay_s=30.0))
    trainer = make_trainer(hub_strategy="every_save")
    trainer.add_callback(StopAfter(3))
    began = time.monotonic()
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert time.monotonic() - began < 10
    assert "What is being sent to the Hub was not there after" in caplog.text
    assert (trainer.checkpoints.path(trainer.state.global_step) / "model.safetensors").is_file()


# What processes leave


def start(folder: Path, *given: str) -> subprocess.Popen:
    words = [sys.executable, str(HELPERS / "pushing_process.py"), str(folder), *given]
    return subprocess.Popen(words, env={**os.environ, "HF_TOKEN": TOKEN}, stdout=PIPE, stderr=STDOUT, text=True)


@pytest.mark.nightly
def test_a_process_killed_in_a_push_leaves_all_whole_and_the_next_push_mends_the_hub(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.append(Fault("POST", "commit", call=lambda: process.kill()))
    process = start(tmp_path / "run", "max_steps=4")
    process.communicate(timeout=300)
    assert process.returncode == -9
    assert len(hub.repositories["me/x"].commits) <= 2  # what the dead process had asked for, whole or not at all
    process = start(tmp_path / "run", "max_steps=4")
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    trained = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert hub.repositories["me/x"].files["model.safetensors"] == trained
    assert messages(hub)[-1] == "Model save"  # which the end of the process has waited for
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-4"]


@pytest.mark.nightly
def test_a_stopped_process_leaves_a_hub_that_hangs_within_its_grace_seconds(hub: HubServer, tmp_path: Path) -> None:
    signalled: list[float] = []

    def stop() -> None:
        signalled.append(time.monotonic())
        process.terminate()
        time.sleep(60)

    hub.faults.append(Fault("POST", "commit", call=stop))
    process = start(tmp_path / "run", "max_steps=1000")
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 75, text
    assert time.monotonic() - signalled[0] < 10
