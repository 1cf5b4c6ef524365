"""Pushes over a real socket to a server that speaks the Hub's API: what leaves, what arrives, and every way to fail."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Fault, HubServer, serve_hub
from huggingface_hub import snapshot_download
from miniature_esm import make_esm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM

from hf_ext.checkpoints.manifest import Manifest, hash_file
from hf_ext.errors import ArgumentError
from hf_ext.hub import HubError, model_files, push, push_folder

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
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(push, "WAITS_S", (0.01,) * 3)
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that is a model, and a token in every file that must not be sent."""
    root = tmp_path / "run" / "model"
    root.mkdir(parents=True)
    save_file({"weight": torch.arange(4096.0)}, root / "model.safetensors")
    (root / "config.json").write_text("{}\n")
    (root / "README.md").write_text("---\nlibrary_name: hf_ext\n---\n# A model\n")
    add_private_files(root)
    return root


def add_private_files(root: Path) -> None:
    for name in PRIVATE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"token: {TOKEN}")


def send(folder: Path, **settings: Any) -> Any:
    return push_folder(folder, "me/model", **{"token": TOKEN, **settings})


def assert_token_stayed_here(hub: HubServer) -> None:
    """In no file, body or address; the header that carries it is where it belongs."""
    stored = [
        content for repo in hub.repositories.values() for files in repo.commits.values() for content in files.values()
    ]
    sent = [request.path.encode() + request.body for request in hub.requests]
    assert len(sent) > 3
    assert not [content for content in [*stored, *hub.objects.values(), *sent] if TOKEN.encode() in content]


# End to end


@torch.no_grad()
def predict_tokens(model: Any) -> torch.Tensor:
    ids = torch.arange(4, 20).repeat(16, 1)
    return model.eval()(input_ids=ids).logits


def shift_trained(model: Any) -> None:
    """Adapters do nothing at the beginning, and would not be missed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


def save_peft(root: Path) -> tuple[torch.Tensor, Callable]:
    base = root.parent / "base"
    make_esm().save_pretrained(base, save_original_format=False)
    model = get_peft_model(AutoModelForMaskedLM.from_pretrained(base), LoraConfig(r=2, target_modules=["query"]))
    shift_trained(model)
    model.save_pretrained(root)
    (root / "README.md").unlink()  # PEFT's empty one names a folder as base_model
    return predict_tokens(model), lambda folder: predict_tokens(
        PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base), folder)
    )


def save_full(root: Path) -> tuple[torch.Tensor, Callable]:
    model = make_esm()
    model.save_pretrained(root, save_original_format=False)
    return predict_tokens(model), lambda folder: predict_tokens(AutoModelForMaskedLM.from_pretrained(folder))


@pytest.mark.parametrize("save", [save_peft, save_full])
def test_a_pushed_model_comes_back_byte_for_byte_and_predicts_the_same_16_rows(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, save: Callable
) -> None:
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "run" / "model"
    expected, load_and_predict = save(root)
    add_private_files(root)
    pushed = send(root)
    fresh = snapshot_download("me/model", revision=pushed.oid, token=TOKEN, local_dir=tmp_path / "fresh")
    assert len(expected) == 16
    assert torch.equal(load_and_predict(Path(fresh)), expected)
    repository = hub.repositories["me/model"]
    assert repository.private
    assert len(repository.commits) == 2  # the empty one, and ours
    assert ("adapter_model.safetensors" if save is save_peft else "model.safetensors") in repository.files
    assert not set(PRIVATE) & set(repository.files)
    assert_token_stayed_here(hub)
    assert "/commit/main" in caplog.text
    assert TOKEN not in caplog.text


# What may leave


def test_the_allow_list_names_model_tokenizer_card_and_report_and_nothing_else(folder: Path) -> None:
    more = ["inputs.json", "report.html", "loss.png", "generation_config.json"]
    more += ["tokenizers/0/vocab.txt", "tokenizer_config.json", "model-00001-of-00002.safetensors"]
    for name in more:
        (folder / name).write_text("{}")
    assert [*model_files(folder)] == sorted(["model.safetensors", "config.json", "README.md", *more])


@pytest.mark.parametrize("name", ["training_args.bin", "global_step2/optim_states.pt"])
def test_a_checkpoint_with_pickles_of_a_library_is_not_sent(hub: HubServer, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"pickle")
    Manifest("run", 1, 0.5, {}, {name: hash_file(folder / name)}).write(folder)
    with pytest.raises(ArgumentError, match=f"holds {name}, which only a library reads"):
        send(folder, checkpoint_as="last-checkpoint")
    assert hub.requests == []


def test_a_model_that_names_a_folder_of_this_machine_is_said_to_load_here_alone(
    hub: HubServer, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"encoders": [{"name_or_path": str(tmp_path)}, {"name_or_path": "facebook/esm2_t6_8M_UR50D"}]}
    (folder / "config.json").write_text(json.dumps(config))
    send(folder)
    assert f"names {tmp_path}, known to this machine alone" in caplog.text


def test_a_link_stays_here_wherever_it_leads(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    for path in (tmp_path / "secret.html", tmp_path / "secret" / "vocab.txt"):
        path.write_text("mine")
    (folder / "report.html").symlink_to(tmp_path / "secret.html")
    (folder / "loss.png").symlink_to("run.log")
    shutil.rmtree(folder / "tokenizers")
    (folder / "tokenizers").mkdir()
    (folder / "tokenizers" / "0").symlink_to(tmp_path / "secret")
    assert [*model_files(folder)] == ["README.md", "config.json", "model.safetensors"]


def test_a_folder_without_weights_is_refused_before_anything_is_sent(hub: HubServer, tmp_path: Path) -> None:
    for name, message in {"nowhere": "is no folder", "": "holds no weights to push"}.items():
        with pytest.raises(ArgumentError, match=message):
            send(tmp_path / name)
    assert hub.requests == []


@pytest.mark.parametrize("secret", [TOKEN, "hf_" + "A1" * 17])
def test_a_file_with_a_token_stops_the_push_before_anything_is_sent(hub: HubServer, folder: Path, secret: str) -> None:
    (folder / "inputs.json").write_text(json.dumps({"hub_token": secret}))
    with pytest.raises(HubError, match=r"^inputs\.json contains an access token") as caught:
        send(folder)
    assert hub.requests == []
    assert secret not in str(caught.value)


def test_a_private_push_to_a_public_repository_is_refused(hub: HubServer, folder: Path) -> None:
    send(folder, private=False)
    assert not hub.repositories["me/model"].private
    (folder / "config.json").write_text('{"changed": 1}')
    with pytest.raises(HubError, match="me/model is public and the push is private; nothing was sent"):
        send(folder)
    assert len(hub.repositories["me/model"].commits) == 2  # the first one and that of the public push


def test_weights_of_an_earlier_push_that_would_be_loaded_instead_are_replaced(hub: HubServer, folder: Path) -> None:
    send(folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    send(folder)
    files = hub.repositories["me/model"].files
    assert set(files) == {".gitattributes", *("README.md", "config.json", "adapter_config.json")} | {
        "adapter_model.safetensors"
    }


def test_weights_that_are_rewritten_during_the_upload_are_an_error(hub: HubServer, folder: Path) -> None:
    path = folder / "model.safetensors"
    other = path.read_bytes()[::-1]
    hub.faults.append(Fault("POST", "objects/batch", call=lambda: path.write_bytes(other)))
    with pytest.raises(HubError, match=r"is not what was sent: model\.safetensors of 3 files"):
        send(folder)


def test_small_files_that_a_run_rewrites_during_the_upload_arrive_as_they_were(hub: HubServer, folder: Path) -> None:
    before = (folder / "README.md").read_bytes()
    hub.faults.append(Fault("POST", "preupload", call=lambda: (folder / "README.md").write_bytes(b"later")))
    send(folder)
    assert hub.repositories["me/model"].files["README.md"] == before


# Failures that pass


PASSING = {
    "503 at creation": (Fault("POST", "repos/create", times=2, status=503), 3),
    "503 at upload": (Fault("PUT", "lfs/objects", times=1, status=503), 2),
    "cut upload": (Fault("PUT", "lfs/objects", times=1, cut=True), 2),
    "cut commit": (Fault("POST", "commit", times=1, cut=True), 2),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_push_gets_through(hub: HubServer, folder: Path, name: str) -> None:
    fault, least_seen = PASSING[name]
    hub.faults.append(fault)
    send(folder)
    assert fault.times == 0  # it did happen
    assert hub.count(fault.method, fault.path) >= least_seen
    assert len(hub.repositories["me/model"].commits) == 2
    assert_token_stayed_here(hub)


def test_pushing_again_what_is_there_makes_no_commit(hub: HubServer, folder: Path) -> None:
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
    hub: HubServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    num_attempts: int,
    message: str,
) -> None:
    monkeypatch.setattr(push, "SILENCE_S", 0.3)
    hub.faults.append(fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=f"(?s){message}") as caught:
        send(folder)
    assert f"python -m hf_ext.hub {folder} me/model" in str(caught.value)
    assert caught.value.exit_code == 69
    assert hub.count(fault.method, fault.path) == num_attempts
    assert TOKEN not in str(caught.value) + caplog.text
    assert len(hub.repositories["me/model"].commits if "me/model" in hub.repositories else [1]) == 1  # as it was


def test_no_token_is_named_with_the_remedy(hub: HubServer, folder: Path) -> None:
    with pytest.raises(HubError, match=r"no token for the Hub\. Run `hf auth login` or set HF_TOKEN"):
        send(folder, token=None)
    assert hub.requests == []


@pytest.mark.parametrize("is_large", [True, False])
def test_what_arrived_otherwise_than_it_was_sent_is_found(hub: HubServer, folder: Path, is_large: bool) -> None:
    def spoil() -> None:
        del hub.repositories["me/model"].files["config.json"]

    hub.faults.append(Fault("PUT", "lfs/objects", damaged=True) if is_large else Fault("GET", "/tree/", call=spoil))
    name = r"model\.safetensors" if is_large else r"config\.json"
    with pytest.raises(HubError, match=f"is not what was sent: {name} of 3 files differ or are missing"):
        send(folder)


# The command


def test_the_command_in_the_error_repeats_the_push(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
