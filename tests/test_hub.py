"""Pushes over a real socket to a server that speaks the Hub's API: what leaves, what arrives, and every way to fail."""

from __future__ import annotations

import errno
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

import huggingface_hub.constants
import pytest
import torch
from hub_server import Fault, HubServer
from miniature_esm import make_esm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from hf_ext.errors import ArgumentError
from hf_ext.hub import HubError, allow_list, push_folder, verify_push
from hf_ext.models.affinity import AffinityModel

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
    # The variables HF_HUB_OFFLINE and HF_HUB_DISABLE_XET, which were read when the tests began.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with HubServer(TOKEN) as server:
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


def push(hub: HubServer, folder: Path, **settings: Any) -> Any:
    return push_folder(folder, "me/model", **{"token": TOKEN, "endpoint": hub.url, "wait_s": 0.01, **settings})


def verify(hub: HubServer, pushed: Any, into: Path) -> Path:
    verify_push(pushed, into, token=TOKEN, endpoint=hub.url, wait_s=0.01)
    return into


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


@pytest.fixture
def save_affinity(make_affinity: Callable, demo_rows: Any) -> Callable:
    def save(training: str, root: Path) -> tuple[torch.Tensor, Callable]:
        model, collator = make_affinity(antibody=training)
        shift_trained(model)
        model.save_pretrained(root)
        collator.save_pretrained(root)

        @torch.no_grad()
        def predict(folder: Path, model: Any = None) -> torch.Tensor:
            model = model or AffinityModel.from_pretrained(folder)
            return model.eval()(**type(collator).from_pretrained(folder)([demo_rows[i] for i in range(16)])).logits

        return predict(root, model), predict

    return save


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["head only", "LoRA in a tower", "PEFT adapter", "full"])
def test_a_pushed_model_comes_back_byte_for_byte_and_predicts_the_same_16_rows(
    hub: HubServer, save_affinity: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "run" / "model"
    makers: dict[str, Callable] = {
        "head only": lambda: save_affinity("frozen", root),
        "LoRA in a tower": lambda: save_affinity("lora", root),
        "PEFT adapter": lambda: save_peft(root),
        "full": lambda: save_full(root),
    }
    expected, load_and_predict = makers[kind]()
    add_private_files(root)
    pushed = push(hub, root)
    again = load_and_predict(verify(hub, pushed, tmp_path / "fresh"))
    assert len(expected) == 16
    assert torch.equal(again, expected)
    assert hub.repositories["me/model"].private
    assert set(hub.repositories["me/model"].files) == {".gitattributes", *pushed.files}
    assert ("adapter_model.safetensors" if kind == "PEFT adapter" else "model.safetensors") in pushed.files
    assert not set(PRIVATE) & set(pushed.files)
    assert_token_stayed_here(hub)
    assert "/commit/main" in caplog.text
    assert TOKEN not in caplog.text


def test_a_pushed_model_loads_by_its_name_in_another_process(hub: HubServer, tmp_path: Path) -> None:
    expected, _ = save_full(tmp_path / "model")
    push(hub, tmp_path / "model")
    script = (
        "import sys, torch\n"
        "from safetensors.torch import save_file\n"
        "from transformers import AutoModelForMaskedLM\n"
        "model = AutoModelForMaskedLM.from_pretrained('me/model').eval()\n"
        "ids = torch.arange(4, 20).repeat(16, 1)\n"
        "save_file({'logits': model(input_ids=ids).logits.detach()}, sys.argv[1])\n"
    )
    there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    run_online([sys.executable, "-c", script, str(tmp_path / "logits.safetensors")], there)
    torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], expected)


def run_online(words: list[str], more: dict[str, str]) -> str:
    """What a process with the token and a network writes to both of its streams."""
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, **more}
    done = subprocess.run(words, env={**os.environ, **online}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_changed_weight_is_told_apart_after_the_push(hub: HubServer, tmp_path: Path) -> None:
    expected, load_and_predict = save_full(tmp_path / "model")
    fresh = verify(hub, push(hub, tmp_path / "model"), tmp_path / "fresh")
    other = AutoModelForMaskedLM.from_pretrained(fresh)
    with torch.no_grad():
        other.lm_head.bias.add_(1.0)
    other.save_pretrained(fresh, save_original_format=False)
    assert not torch.equal(load_and_predict(fresh), expected)


# What may leave


@pytest.mark.parametrize(("save_full", "training"), [(True, "frozen"), (False, "full"), (False, "frozen")])
def test_paths_of_this_machine_leave_only_where_loading_reads_them(
    hub: HubServer, folder: Path, save_full: bool, training: str
) -> None:
    encoder = {"name_or_path": "/home/ann/esm", "training": training, "config": {"hidden_size": 8}}
    config = {"save_full": save_full, "encoders": [encoder], "model_type": "hf_ext_affinity"}
    (folder / "config.json").write_text(json.dumps(config))
    push(hub, folder)
    files = hub.repositories["me/model"].files
    is_needed = (save_full, training) == (False, "frozen")
    encoder["name_or_path"] = "/home/ann/esm" if is_needed else "esm"
    assert json.loads(files["config.json"]) == config
    assert "/home/ann" in (folder / "config.json").read_text()  # here it stays


@pytest.mark.parametrize(
    ("save_full", "training", "is_needed"),
    [(True, "frozen", False), (False, "full", False), (False, "lora", False), (False, "frozen", True)],
)
def test_so_do_those_of_a_generator_which_is_saved_whole_with_adapters_too(
    hub: HubServer, folder: Path, save_full: bool, training: str, is_needed: bool
) -> None:
    encoder = {"name_or_path": "/home/ann/esm", "training": training, "config": {"hidden_size": 8}}
    config = {"save_full": save_full, "antigen_encoder": encoder, "model_type": "hf_ext_generator"}
    (folder / "config.json").write_text(json.dumps(config))
    push(hub, folder)
    encoder["name_or_path"] = "/home/ann/esm" if is_needed else "esm"
    assert json.loads(hub.repositories["me/model"].files["config.json"]) == config


def test_the_allow_list_names_model_tokenizer_card_and_report_and_nothing_else(folder: Path) -> None:
    more = ["inputs.json", "report.html", "report.md", "loss.png", "adapter_config.json", "generation_config.json"]
    more += ["tokenizers/0/vocab.txt", "tokenizer_config.json", "model-00001-of-00002.safetensors"]
    for name in more:
        (folder / name).write_text("{}")
    assert allow_list(folder) == sorted(["model.safetensors", "config.json", "README.md", *more])


def test_a_link_stays_here_wherever_it_leads(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    for path in (tmp_path / "secret.html", tmp_path / "secret" / "vocab.txt"):
        path.write_text("mine")
    (folder / "report.html").symlink_to(tmp_path / "secret.html")
    (folder / "report.md").symlink_to("run.log")
    shutil.rmtree(folder / "tokenizers")
    (folder / "tokenizers").mkdir()
    (folder / "tokenizers" / "0").symlink_to(tmp_path / "secret")
    assert allow_list(folder) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize(("name", "message"), [("nowhere", "is not a folder"), ("", "holds no weights to push")])
def test_a_folder_without_weights_is_refused_before_anything_is_sent(
    hub: HubServer, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        push(hub, tmp_path / name)
    assert hub.requests == []


@pytest.mark.parametrize("secret", [TOKEN, "hf_" + "A1" * 17])
def test_a_file_with_a_token_stops_the_push_before_anything_is_sent(hub: HubServer, folder: Path, secret: str) -> None:
    (folder / "inputs.json").write_text(json.dumps({"hub_token": secret}))
    with pytest.raises(HubError, match=r"^inputs\.json contains an access token") as caught:
        push(hub, folder)
    assert hub.requests == []
    assert secret not in str(caught.value)


def test_a_private_push_to_a_public_repository_is_refused(hub: HubServer, folder: Path) -> None:
    push(hub, folder, private=False)
    assert not hub.repositories["me/model"].private
    (folder / "config.json").write_text('{"changed": 1}')
    with pytest.raises(HubError, match="me/model is public and the push is private; nothing was sent"):
        push(hub, folder)
    assert len(hub.repositories["me/model"].commits) == 2  # the first one and that of the public push


def test_weights_of_an_earlier_push_that_would_be_loaded_instead_are_replaced(hub: HubServer, folder: Path) -> None:
    push(hub, folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    push(hub, folder)
    files = hub.repositories["me/model"].files
    assert set(files) == {".gitattributes", *("README.md", "config.json", "adapter_config.json")} | {
        "adapter_model.safetensors"
    }


def refuse_to_link(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("hard_links", [True, False])
def test_rotation_during_the_upload_takes_nothing_away(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse_to_link)  # as on a FAT disk
    hub.faults.append(Fault("POST", "preupload", call=lambda: shutil.rmtree(folder)))
    pushed = push(hub, folder)
    assert not folder.exists()
    verify(hub, pushed, tmp_path / "fresh")
    assert list(folder.parent.iterdir()) == []  # the pinned copy is gone, too


def test_weights_that_are_rewritten_during_the_upload_are_an_error(hub: HubServer, folder: Path) -> None:
    hub.faults.append(Fault("POST", "commit", call=lambda: (folder / "model.safetensors").write_bytes(b"other")))
    with pytest.raises(HubError, match="were written to while they were pushed"):
        push(hub, folder)


def test_small_files_that_a_run_rewrites_during_the_upload_arrive_as_they_were(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    before = (folder / "README.md").read_bytes()
    hub.faults.append(Fault("POST", "preupload", call=lambda: (folder / "README.md").write_bytes(b"later")))
    verify(hub, push(hub, folder), tmp_path / "fresh")
    assert (tmp_path / "fresh" / "README.md").read_bytes() == before


# Failures that pass


@pytest.mark.parametrize(
    ("fault", "least_seen"),
    [
        (Fault("POST", "repos/create", times=2, status=503), 3),
        (Fault("POST", "preupload", times=1, status=503), 2),
        (Fault("PUT", "lfs/objects", times=1, status=503), 2),
        (Fault("PUT", "lfs/objects", times=1, cut=True), 2),
        (Fault("POST", "commit", times=1, status=500), 2),
        (Fault("POST", "commit", times=1, cut=True), 2),
        (Fault("POST", "", times=20, delay_s=0.1), 1),
    ],
    ids=["503 at creation", "503 at preupload", "503 at upload", "cut upload", "500 at commit", "cut commit", "slow"],
)
def test_a_push_gets_through(hub: HubServer, folder: Path, tmp_path: Path, fault: Fault, least_seen: int) -> None:
    hub.faults.append(fault)
    pushed = push(hub, folder)
    assert fault.times in (0, 20 - hub.count("POST", ""))  # it did happen
    assert hub.count(fault.method, fault.path) >= least_seen
    assert len(hub.repositories["me/model"].commits) == 2
    verify(hub, pushed, tmp_path / "fresh")
    assert_token_stayed_here(hub)


def test_a_download_that_is_cut_is_made_whole(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    pushed = push(hub, folder)
    hub.faults.append(Fault("GET", r"resolve/.*/model\.safetensors", cut=True))
    verify(hub, pushed, tmp_path / "fresh")
    assert hub.faults[0].times == 0


def test_pushing_again_what_is_there_makes_no_commit(hub: HubServer, folder: Path) -> None:
    assert push(hub, folder).commit == push(hub, folder).commit
    assert len(hub.repositories["me/model"].commits) == 2


# Failures that last


@pytest.mark.parametrize(
    ("fault", "retries", "num_attempts", "message"),
    [
        (Fault("POST", "repos/create", 99, status=503), 2, 3, "after 3 attempt.*503"),
        (Fault("POST", "repos/create", 99, status=401, text=f"who is {TOKEN}?"), 2, 1, "after 1 attempt.*401"),
        (Fault("POST", "repos/create", 99, cut=True), 1, 2, "after 2 attempt"),
        (Fault("POST", "commit", 99, status=500), 1, 2, "after 2 attempt.*500"),
        (Fault("POST", "commit", 99, status=403), 2, 1, "after 1 attempt.*403"),
        (Fault("POST", "validate-yaml", 99, status=400), 2, 1, "after 1 attempt.*README.md"),
        (Fault("PUT", "lfs/objects", 99, status=403), 1, 1, "after 1 attempt.*403"),
    ],
    ids=["503", "401", "cut", "commit 500", "commit 403", "bad card", "upload forbidden"],
)
def test_a_push_that_fails_names_the_command_that_repeats_it(
    hub: HubServer,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    retries: int,
    num_attempts: int,
    message: str,
) -> None:
    hub.faults.append(fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=f"(?s){message}") as caught:
        push(hub, folder, retries=retries)
    assert f"python -m hf_ext.hub {folder} me/model --endpoint {hub.url}" in str(caught.value)
    assert caught.value.exit_code == 69
    assert hub.count(fault.method, fault.path) == num_attempts
    assert TOKEN not in str(caught.value) + caplog.text
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_server_that_is_not_there_is_named(folder: Path, hub: HubServer) -> None:
    with pytest.raises(HubError, match=r"was not pushed to me/model, after 2 attempt\(s\): ConnectError"):
        push(hub, folder, endpoint="http://127.0.0.1:9", retries=1)


def test_offline_mode_is_named_at_once(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"after 1 attempt\(s\): OfflineModeIsEnabled.*HF_HUB_OFFLINE"):
        push(hub, folder)


def test_no_token_is_named_with_the_remedy(hub: HubServer, folder: Path) -> None:
    with pytest.raises(HubError, match=r"no token for the Hub\. Run `hf auth login` or set HF_TOKEN"):
        push(hub, folder, token=None)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("fault", "before"),
    [(Fault("PUT", "lfs/objects", damaged=True), True), (Fault("GET", r"resolve/.*/model", damaged=True), False)],
    ids=["stored wrong", "sent wrong"],
)
def test_wrong_bytes_are_found_by_the_check(
    hub: HubServer, folder: Path, tmp_path: Path, fault: Fault, before: bool
) -> None:
    hub.faults += [fault] if before else []
    pushed = push(hub, folder)
    hub.faults += [] if before else [fault]
    with pytest.raises(HubError, match=r"not what was pushed: model\.safetensors of 3 files"):
        verify(hub, pushed, tmp_path / "fresh")


def test_a_file_that_vanished_from_the_commit_is_found_by_the_check(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    pushed = push(hub, folder)
    del hub.repositories["me/model"].files["config.json"]
    with pytest.raises(HubError, match=r"not what was pushed: config\.json \(missing\)"):
        verify(hub, pushed, tmp_path / "fresh")


def test_a_check_that_finds_the_repository_gone_says_so(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    pushed = push(hub, folder)
    hub.repositories.clear()
    with pytest.raises(HubError, match="could not be downloaded to check it, after 1 attempt"):
        verify(hub, pushed, tmp_path / "fresh")


def test_the_check_wants_a_fresh_folder(hub: HubServer, folder: Path) -> None:
    with pytest.raises(ArgumentError, match="is not an empty folder"):
        verify(hub, push(hub, folder), folder)


# The command


def test_the_command_in_the_error_repeats_the_push(hub: HubServer, folder: Path) -> None:
    hub.faults.append(Fault("POST", "commit", status=500))
    with pytest.raises(HubError) as caught:
        push(hub, folder, retries=0)
    command = str(caught.value).split("HF_TOKEN set: ")[1]
    program, *words = shlex.split(command)
    assert program == "python"
    output = run_online([sys.executable, *words], {})
    assert "3 files, downloaded again and equal byte for byte" in output
    assert {"README.md", "config.json", "model.safetensors"} < set(hub.repositories["me/model"].files)
    assert TOKEN not in output
    assert_token_stayed_here(hub)
