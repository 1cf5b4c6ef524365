"""Pushes over a real socket to a server that speaks the Hub's API: what leaves, what arrives, and every way to fail."""

import csv
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Fault, HubServer, find_token, serve_hub
from huggingface_hub import HfApi, snapshot_download
from miniature_esm import make_esm
from safetensors.torch import save_file
from tiny_classifier import ROWS, make_args, make_model
from transformers import AutoModelForMaskedLM, EsmForSequenceClassification, TrainerCallback

from hf_ext.checkpoints import write_model_manifest
from hf_ext.errors import ArgumentError, TrainingStopped
from hf_ext.hub import HubError, model_files, push, push_folder
from hf_ext.saving import pusher
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

TOKEN = "hf_" + "canary" * 5 + "bird"
# What a run leaves in its folder and must stay there; each holds the token.
PRIVATE = (
    *("training_args.bin", "training_args.json", "optimizer.pt", "optimizer.pt", "optimizer.json"),
    *("scheduler.pt", "rank_0.json", "rank_0.safetensors", "rng_state.pth", "trainer_state.json", "run.log"),
    *("pytorch_model.bin", "head.pkl", "predictions.csv", "train.parquet", ".env", "token", "manifest.json"),
    *("checkpoint-2/model.safetensors", "checkpoint-2/optimizer.pt", "tokenizers/0/notes.txt", "report.csv"),
    "plan.json",  # holds paths
)


@pytest.fixture
def hub(monkeypatch) -> Iterator[HubServer]:
    monkeypatch.setattr(push, "WAITS_S", (0.01,) * 3)
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    """The least that is a model, and a token in every file that must not be sent."""
    root = tmp_path / "run" / "model"
    root.mkdir(parents=True)
    save_file({"weight": torch.arange(4096.0)}, root / "model.safetensors")
    (root / "config.json").write_text("{}\n")
    (root / "README.md").write_text("---\nlibrary_name: hf_ext\n---\n# A model\n")
    add_private_files(root)
    return root


def add_private_files(root) -> None:
    for name in PRIVATE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"token: {TOKEN}")


def send(folder, **settings) -> Any:
    return push_folder(folder, "me/model", **{"token": TOKEN, **settings})


def assert_token_stayed_here(hub) -> None:
    """In no file, body or address; the header that carries it is where it belongs."""
    stored = [
        content for repo in hub.repositories.values() for files in repo.commits.values() for content in files.values()
    ]
    sent = [request.path.encode() + request.body for request in hub.requests]
    assert len(sent) > 3
    assert not [content for content in [*stored, *hub.objects.values(), *sent] if TOKEN.encode() in content]


# End to end


@torch.no_grad()
def predict_tokens(model) -> torch.Tensor:
    ids = torch.arange(4, 20).repeat(16, 1)
    return model.eval()(input_ids=ids).logits


def test_a_pushed_model_comes_back_byte_for_byte_and_predicts_the_same_16_rows(hub, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "run" / "model"
    model = make_esm()
    model.save_pretrained(root, save_original_format=False)
    expected = predict_tokens(model)
    add_private_files(root)
    pushed = send(root)
    fresh = snapshot_download("me/model", revision=pushed.oid, token=TOKEN, local_dir=tmp_path / "fresh")
    assert len(expected) == 16
    assert torch.equal(predict_tokens(AutoModelForMaskedLM.from_pretrained(fresh)), expected)
    repository = hub.repositories["me/model"]
    assert repository.private
    assert len(repository.commits) == 2  # the empty one, and ours
    assert "model.safetensors" in repository.files
    assert not set(PRIVATE) & set(repository.files)
    assert_token_stayed_here(hub)
    assert "/commit/main" in caplog.text
    assert TOKEN not in caplog.text


# What may leave


def test_the_allow_list_names_model_tokenizer_card_and_report_and_nothing_else(folder):
    more = ["inputs.json", "report.html", "loss.png", "generation_config.json"]
    more += ["tokenizers/0/vocab.txt", "tokenizer_config.json", "model-00001-of-00002.safetensors"]
    for name in more:
        (folder / name).write_text("{}")
    assert [*model_files(folder)] == sorted(["model.safetensors", "config.json", "README.md", *more])


def test_a_link_stays_here_wherever_it_leads(folder, tmp_path):
    (tmp_path / "secret").mkdir()
    for path in (tmp_path / "secret.html", tmp_path / "secret" / "vocab.txt"):
        path.write_text("mine")
    (folder / "report.html").symlink_to(tmp_path / "secret.html")
    (folder / "loss.png").symlink_to("run.log")
    shutil.rmtree(folder / "tokenizers")
    (folder / "tokenizers").mkdir()
    (folder / "tokenizers" / "0").symlink_to(tmp_path / "secret")
    assert [*model_files(folder)] == ["README.md", "config.json", "model.safetensors"]


def test_a_folder_without_weights_is_refused_before_anything_is_sent(hub, tmp_path):
    for name, message in {"nowhere": "is no folder", "": "holds no weights to push"}.items():
        with pytest.raises(ArgumentError, match=message):
            send(tmp_path / name)
    assert hub.requests == []


@pytest.mark.parametrize("secret", [TOKEN, "hf_" + "A1" * 17])
def test_a_file_with_a_token_stops_the_push_before_anything_is_sent(hub, folder, secret):
    (folder / "inputs.json").write_text(json.dumps({"hub_token": secret}))
    with pytest.raises(HubError, match=r"^inputs\.json contains an access token") as caught:
        send(folder)
    assert hub.requests == []
    assert secret not in str(caught.value)


def test_a_private_push_to_a_public_repository_is_refused(hub, folder):
    send(folder, private=False)
    assert not hub.repositories["me/model"].private
    (folder / "config.json").write_text('{"changed": 1}')
    with pytest.raises(HubError, match="me/model is public and the push is private; nothing was sent"):
        send(folder)
    assert len(hub.repositories["me/model"].commits) == 2  # the first one and that of the public push


def test_weights_of_an_earlier_push_that_would_be_loaded_instead_are_replaced(hub, folder):
    send(folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    send(folder)
    files = hub.repositories["me/model"].files
    assert set(files) == {".gitattributes", *("README.md", "config.json", "adapter_config.json")} | {
        "adapter_model.safetensors"
    }


@pytest.mark.parametrize("moment", ["repos/create", "objects/batch", "objects/verify"])
def test_weights_that_are_rewritten_during_a_push_are_an_error_and_nothing_is_committed(hub, folder, moment):
    path = folder / "model.safetensors"
    write_model_manifest(folder)
    other = path.read_bytes()[::-1]
    hub.faults.append(Fault("POST", moment, call=lambda: path.write_bytes(other)))
    with pytest.raises(HubError, match=r"^model\.safetensors in .* changed during the push; nothing was committed"):
        send(folder)
    assert len(hub.repositories["me/model"].commits) == 1


# Failures that pass


PASSING = {
    "503 at creation": (Fault("POST", "repos/create", times=2, status=503), 3),
    "503 at upload": (Fault("PUT", "lfs/objects", times=1, status=503), 2),
    "cut upload": (Fault("PUT", "lfs/objects", times=1, cut=True), 2),
    "cut commit": (Fault("POST", "commit", times=1, cut=True), 2),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_push_gets_through(hub, folder, name):
    fault, least_seen = PASSING[name]
    hub.faults.append(fault)
    send(folder)
    assert fault.times == 0  # it did happen
    assert hub.count(fault.method, fault.path) >= least_seen
    assert len(hub.repositories["me/model"].commits) == 2
    assert_token_stayed_here(hub)


def test_pushing_again_what_is_there_makes_no_commit(hub, folder):
    assert send(folder).oid == send(folder).oid
    assert len(hub.repositories["me/model"].commits) == 2


# Failures that last


@pytest.mark.parametrize(
    ("fault", "num_attempts", "message"),
    [
        (Fault("POST", "repos/create", 99, status=401, text=f"who is {TOKEN}?"), 1, "after 1 attempt.*401"),
        (Fault("POST", "commit", 99, status=500), 4, "after 4 attempt.*500"),
        (Fault("POST", "commit", 99, delay_s=5.0), 4, "after 4 attempt.*ReadTimeout"),
        (Fault("POST", "validate-yaml", 99, status=400), 1, "after 1 attempt.*README.md"),
        (Fault("PUT", "lfs/objects", 99, status=403), 1, "after 1 attempt.*403"),
    ],
    ids=["401", "commit 500", "silent", "bad card", "upload forbidden"],
)
def test_a_push_that_fails_names_the_command_that_repeats_it(
    hub, folder, monkeypatch, caplog, fault, num_attempts, message
):
    monkeypatch.setattr(push, "SILENCE_S", 0.3)
    hub.faults.append(fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=f"(?s){message}") as caught:
        send(folder)
    assert f"python -m hf_ext.hub {folder} me/model" in str(caught.value)
    assert caught.value.exit_code == 69
    assert hub.count(fault.method, fault.path) == num_attempts
    assert TOKEN not in str(caught.value) + caplog.text
    assert len(hub.repositories["me/model"].commits if "me/model" in hub.repositories else [1]) == 1  # as it was


@pytest.mark.parametrize(("path", "key"), [("repos/create", "url"), ("commit/", "commitUrl")])
def test_an_answer_that_lacks_what_is_read_is_one_line_and_not_asked_for_again(hub, folder, path, key):
    hub.faults.append(Fault("POST", path, 99, lacks=key))
    with pytest.raises(HubError, match=f"answer was not understood .KeyError: '{key}'.*python -m hf_ext.hub") as end:
        send(folder)
    assert "\n" not in str(end.value)
    assert hub.count("POST", path) == 1


def test_no_token_is_named_with_the_remedy(hub, folder):
    with pytest.raises(HubError, match=r"no token for the Hub\. Run `hf auth login` or set HF_TOKEN"):
        send(folder, token=None)
    assert hub.requests == []


@pytest.mark.parametrize("is_large", [True, False])
def test_what_arrived_otherwise_than_it_was_sent_is_found(hub, folder, is_large):
    def spoil() -> None:
        del hub.repositories["me/model"].files["config.json"]

    hub.faults.append(Fault("PUT", "lfs/objects", damaged=True) if is_large else Fault("GET", "/tree/", call=spoil))
    name = r"model\.safetensors" if is_large else r"config\.json"
    with pytest.raises(HubError, match=f"is not what was sent: {name} of 3 files differ or are missing"):
        send(folder)


# The command


def test_the_command_in_the_error_repeats_the_push(hub, folder, monkeypatch):
    monkeypatch.setattr(push, "WAITS_S", ())
    hub.faults.append(Fault("POST", "commit", status=500))
    with pytest.raises(HubError) as caught:
        send(folder)
    assert len(hub.repositories["me/model"].commits) == 1  # what failed left nothing
    program, *words = shlex.split(str(caught.value).split("HF_TOKEN set: ")[1])
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "HF_TOKEN": TOKEN}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "every file there is the one that was sent" in done.stdout
    assert {"README.md", "config.json", "model.safetensors"} < set(hub.repositories["me/model"].files)
    assert TOKEN not in done.stdout + done.stderr
    assert_token_stayed_here(hub)


@pytest.fixture
def make_trainer(tmp_path, hub) -> Callable[..., FastTrainer]:
    """A tiny classifier; 4 steps, saved every second one, the older checkpoint deleted."""
    pushing = {"push_to_hub": True, "hub_model_id": "me/x", "hub_strategy": "end", "hub_token": TOKEN}

    def make(model=None, **given) -> FastTrainer:
        folder = given.pop("output_dir", tmp_path / "run")
        args = make_args(folder, **{"save_total_limit": 1, **pushing, **given})
        return FastTrainer(model or make_model(), args, train_dataset=ROWS, eval_dataset=ROWS)

    return make


def train_to_end(trainer) -> None:
    """As a recipe does."""
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub()
    trainer.end()


# What leaves


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", ["frozen", "lora", "full"])
def test_of_an_affinity_model_no_token_no_pickle_and_no_record_leaves(
    hub, make_affinity, demo_encoders, demo_rows, tmp_path, caplog, capfd, training
):
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
    every = {name for files in repository.commits.values() for name in files}
    assert not [name for name in every if name.endswith((".bin", ".pt", ".pth", ".pkl")) or "optimizer" in name]
    assert not {"training_args.json", "trainer_state.json", "run.log", "rank_0.json"} & every
    assert find_token(TOKEN, hub, tmp_path, caplog.text, *capfd.readouterr()) == []


def test_a_card_that_is_there_is_pushed_as_it_is(make_trainer, hub, tmp_path):
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


def messages(hub) -> list[str]:
    return hub.repositories["me/x"].messages[1:]


class WaitForPush(TrainerCallback):
    """Training that is as slow as its pushes."""

    def on_step_begin(self, *args, **kwargs):
        while any(thread.name == "hub-push" for thread in threading.enumerate()):
            time.sleep(0.01)


def test_every_save_pushes_each_checkpoint_while_training_goes_on(make_trainer, hub):
    trainer = make_trainer(hub_strategy="every_save", max_steps=4)
    trainer.add_callback(WaitForPush())
    trainer.train()
    assert messages(hub) == [f"Training in progress, checkpoint-{step}" for step in (2, 4)]
    assert set(hub.repositories["me/x"].files) == {".gitattributes", "config.json", "model.safetensors"}


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_push_whole_checkpoints_are_refused_before_training(make_trainer, hub, strategy):
    with pytest.raises(ArgumentError, match=f"hub_strategy={strategy}: whole checkpoints are not pushed. Give every_s"):
        make_trainer(hub_strategy=strategy)
    assert hub.requests == []


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), 15)


def test_of_a_checkpoint_that_holds_only_what_trains_the_model_is_pushed_at_the_end(
    make_trainer, hub, tmp_path, caplog
):
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
def test_a_save_during_a_push_is_left_to_the_next_one_unless_every_one_is_wanted(make_trainer, hub, tmp_path, always):
    def wait_for_all() -> None:
        wait_for((tmp_path / "run" / "checkpoint-4").is_dir)
        time.sleep(0.2)  # its push is asked for right after

    given = {"save_total_limit": None if always else 1, "hub_always_push": always}
    trainer = make_trainer(hub_strategy="every_save", save_steps=1, **given)
    hub.faults.append(Fault("POST", "preupload", call=wait_for_all))
    trainer.train()
    assert hub.faults[0].times == 0
    expected = (1, 2, 3, 4) if always else (1, 4)
    assert messages(hub) == [f"Training in progress, checkpoint-{step}" for step in expected]
    left = {path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")}
    assert left == ({f"checkpoint-{step}" for step in expected} if always else {"checkpoint-4"})


def wait_for(holds, limit_s=30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_checkpoint_stays_while_it_is_sent_on_top_of_the_budget(make_trainer, hub, tmp_path):
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


# Failures that a run may meet


def test_no_right_to_write_no_token_and_a_public_repository_are_found_before_training(make_trainer, hub):
    make_trainer(hub_private_repo=False)
    with pytest.raises(HubError, match="me/x is public and the push is private"):
        make_trainer()
    with pytest.raises(HubError, match="There is no token for the Hub"):
        make_trainer(hub_token=None)
    hub.can_write = False
    with pytest.raises(HubError, match=r"me/x on the Hub cannot be written to, after 1 attempt.*403"):
        make_trainer()
    hub.token = "hf_another"
    with pytest.raises(HubError, match=r"cannot be written to, after 1 attempt.*401") as caught:
        make_trainer()
    assert TOKEN not in str(caught.value)


def test_a_503_for_good_is_an_error_at_the_end_with_the_command_that_repeats_it(make_trainer, hub, tmp_path, caplog):
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


def test_a_hub_that_hangs_holds_the_end_of_training_up_for_a_bounded_time(make_trainer, hub, monkeypatch, caplog):
    monkeypatch.setattr(pusher, "END_WAIT_S", 0.5)
    hub.faults.append(Fault("POST", "commit", delay_s=30.0))
    trainer = make_trainer(hub_strategy="every_save")
    trainer.train()
    assert trainer.state.global_step == 4
    assert "What is being sent to the Hub was not there after" in caplog.text
    with pytest.raises(HubError, match="did not end within"):
        trainer.end()


def test_a_stop_does_not_wait_for_a_hub_that_hangs(make_trainer, hub, tmp_path, monkeypatch, caplog):
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


PUSHING = ("--push_to_hub", "true", "--hub_model_id", "me/x", "--hub_strategy", "every_save", "--hub_token", TOKEN)


def run_command(folder, home, *words) -> str:
    environment = {**os.environ, "HF_HOME": str(folder / home), "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "hf_ext", *words, "--embedding_cache_dir", "cache"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("training", ["frozen", "lora"])
def test_a_model_of_the_recipe_is_pushed_and_predicts_from_its_name(hub, tmp_path, training):
    words = ("--num_train_epochs", "2", "--tower_training", training, "--output_dir", "run", *PUSHING)
    trained = run_command(tmp_path, "home", "train", *words)
    with open(tmp_path / "run" / "predictions.csv", newline="") as file:
        expected = list(csv.DictReader(file))[:16]
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["heavy", "light", "antigen"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(expected)
    predicted = run_command(tmp_path, "fresh", "predict", "--model", "me/x", "--dataset_name", "rows.csv")
    with open(tmp_path / "predictions.csv", newline="") as file:
        found = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert found == pytest.approx([float(row["prediction"]) for row in expected], abs=0.03)  # bfloat16 products
    assert not [name for name in hub.repositories["me/x"].files if name.endswith(".csv") or "optimizer" in name]
    assert find_token(TOKEN, hub, tmp_path, trained, predicted) == []
