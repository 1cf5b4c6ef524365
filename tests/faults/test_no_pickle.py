"""Hostile files are refused and nothing in them runs; nothing outside a checkpoint is touched; no secret is written."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from faulty_runs import Maker, contents, make_lora, messages, names
from miniature_esm import make_narrow_esm
from payload import Payload
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from hf_ext.errors import CheckpointError, TrainingStopped

SECRET = "hf_CANARYcanaryCANARYcanaryCANARY1234"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".metadata", ".ckpt")
BESIDE = ("pytorch_model.bin", "optimizer.bin", "scaler.pt", "rng_state_0.pth", "training_args.bin")
BESIDE += ("model.pth", "trainable.safetensors")
REFUSED = (CheckpointError, ValueError, pickle.UnpicklingError, RuntimeError)  # of hf_ext, Trainer, torch


def write_payload(path, canary, is_zip) -> None:
    """What `torch.save` writes, in its present or its old format, around the payload."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.parent / "payload.tmp"  # torch takes no name without a stem
    torch.save({"state": Payload(canary)}, file, _use_new_zipfile_serialization=is_zip)
    file.replace(path)


class Runs:
    """Killed runs of an ESM, of LoRA and of stock Trainer, and the canary of all payloads."""

    def __init__(self, folder):
        self.folder, self.canary = folder, folder / "canary"
        self.make = {"esm": Maker(make_narrow_esm()), "lora": Maker(make_lora(folder / "base"))}
        for name, make in self.make.items():
            make.killed(folder / name, at=5)
            make.killed(folder / f"stock {name}", at=5, trainer=Trainer)
        self.outside = folder / "outside"
        self.outside.mkdir()
        shutil.copy(folder / "esm" / "checkpoint-4" / "model.safetensors", self.outside / "model.safetensors")
        (self.outside / "victim").write_text("mine")

    def copy(self, name, folder) -> Path:
        return Path(shutil.copytree(self.folder / name, folder))

    def refused(self, folder, *words, name="esm") -> None:
        """That a checkpoint folder that is named is refused in these words, and has changed nothing."""
        before = contents(folder), contents(self.outside)
        trainer = self.make[name](folder.parent / "new", save_strategy="no")
        with pytest.raises(REFUSED) as error:
            trainer.train(resume_from_checkpoint=str(folder))
        assert not self.canary.exists()
        assert (contents(folder), contents(self.outside)) == before
        for word in words:
            assert word in str(error.value)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def probed(runs):
    """Whatever a test does, nothing runs and nothing outside changes."""
    before = contents(runs.outside)
    yield
    assert not runs.canary.exists()
    assert contents(runs.outside) == before


@pytest.mark.sampled(12)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "bare"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_pickle_beside_our_files_is_refused(name, is_zip, runs, tmp_path):
    folder = runs.copy("esm", tmp_path / "run") / "checkpoint-4"
    write_payload(folder / name, runs.canary, is_zip)
    runs.refused(folder, f"{name}: not in its manifest")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "bare"])
@pytest.mark.parametrize("place", ["manifest.json", "optimizer.pt", "rng_state.pth", "model.safetensors"])
def test_a_pickle_in_the_place_of_our_files_is_damage(place, is_zip, runs, tmp_path):
    folder = runs.copy("esm", tmp_path / "run")
    write_payload(folder / "checkpoint-4" / place, runs.canary, is_zip)
    runs.refused(folder / "checkpoint-4", place, "expected ")
    runs.make["esm"](folder, resume="auto", save_strategy="no").train()
    assert not runs.canary.exists()
    assert runs.make["esm"].watch.began_at == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "bare"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("esm", "pytorch_model.bin"),
        ("lora", "adapter_model.bin"),
        *((kind, name) for kind in ("esm", "lora") for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")),
        ("esm", "pytorch_model_fsdp_0/.metadata"),
    ],
)
def test_a_pickle_in_a_stock_checkpoint_is_not_run(kind, name, is_zip, runs, tmp_path):
    folder = runs.copy(f"stock {kind}", tmp_path / "run") / "checkpoint-4"
    weights = {"pytorch_model.bin": "model.safetensors", "adapter_model.bin": "adapter_model.safetensors"}
    weights |= {"pytorch_model_fsdp_0/.metadata": "model.safetensors"}
    if name in weights:
        (folder / weights[name]).unlink()
    write_payload(folder / name, runs.canary, is_zip)
    runs.refused(folder, name=kind)


@pytest.mark.parametrize("name", ["training_args.bin", ".metadata", "optimizer_0/.metadata"])
def test_a_pickle_that_nobody_needs_in_a_stock_checkpoint_is_not_read(name, runs, tmp_path):
    folder = runs.copy("stock esm", tmp_path / "run") / "checkpoint-4"
    write_payload(folder / name, runs.canary, True)
    runs.make["esm"](tmp_path / "new", resume=str(folder), save_strategy="no").train()
    assert not runs.canary.exists()
    assert runs.make["esm"].watch.began_at == 4


def test_twin_the_payload_does_run_where_it_is_unpickled(runs, tmp_path):
    for is_zip in (True, False):
        write_payload(tmp_path / "x.pt", tmp_path / "ran", is_zip)
        torch.load(tmp_path / "x.pt", weights_only=False)
        (tmp_path / "ran").rmdir()


def outside_names(folder, outside) -> list[str]:
    """Names for a file outside a checkpoint."""
    relative = os.path.relpath(outside / "model.safetensors", folder)
    return [relative, str(outside / "model.safetensors"), f"./{relative}", f"x/../{relative}", "..", ""]


def sign(content) -> str:
    """A manifest with the hash that its content should have: what somebody who knows the format can write."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def record(path) -> dict:
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", range(6))
def test_a_manifest_that_names_what_is_outside_is_refused(which, runs, tmp_path):
    folder = runs.copy("esm", tmp_path / "run") / "checkpoint-4"
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][outside_names(folder, runs.outside)[which]] = record(runs.outside / "model.safetensors")
    (folder / "manifest.json").write_text(sign(content))
    runs.refused(folder, "expected a plain path inside the checkpoint")


@pytest.mark.parametrize("kind", ["file", "folder", "manifest"])
def test_a_link_inside_our_checkpoint_is_refused(kind, runs, tmp_path):
    folder = runs.copy("esm", tmp_path / "run") / "checkpoint-4"
    content = json.loads((folder / "manifest.json").read_text())
    if kind == "file":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(runs.outside / "model.safetensors")
    elif kind == "folder":
        (folder / "inside").symlink_to(runs.outside)
        content["files"]["inside/model.safetensors"] = record(runs.outside / "model.safetensors")
        (folder / "manifest.json").write_text(sign(content))
    else:
        (folder / "manifest.json").rename(folder / "other.json")
        (folder / "manifest.json").symlink_to(folder / "other.json")
    runs.refused(folder, "found a link" if kind == "manifest" else "found a symlink")


def is_pickle(path) -> bool:
    """Whether a file is a pickle, or an archive with one inside."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    head = path.read_bytes()[:2]
    return path.name.endswith(PICKLES) or head[:1] == b"\x80" or head in (b"(d", b"(l", b"cc")


def scan(folder) -> dict[str, list[str]]:
    """Files below a folder, and those with a pickle or the secret in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "files": [str(path) for path in files],
        "pickles": [path.name for path in files if is_pickle(path)],
        "secrets": [path.name for path in files if SECRET.encode() in path.read_bytes()],
    }


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


SECRETS = {"hub_token": SECRET, "hub_model_id": "someone/something"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["esm", "lora", "frozen and cached"])
def test_scan_of_all_that_a_run_writes_finds_tensors_and_plain_values_and_no_token(
    kind, runs, make_affinity, demo_rows, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    given = {**SECRETS, "log_level": "debug"}
    make = runs.make.get(kind)
    if make is None:
        model, collator = make_affinity()
        make = Maker(model, collator)
        given |= {"speedups": ["embedding_cache"], "embedding_cache_dir": str(tmp_path / "cache"), "max_steps": 6}
        given["rows"] = demo_rows.select(range(12))
    with messages() as log:
        with pytest.raises(TrainingStopped):
            make(tmp_path / "run", callbacks=[Stop()], **given).train()
        trainer = make(tmp_path / "run", resume="auto", **given)
        trainer.train()
        trainer.save_model(str(tmp_path / "export"))
        trainer.save_state()
        trainer.save_metrics("train", {"loss": 1.0})
        trainer.create_model_card(model_name="x")
        if kind == "lora":
            trainer.save_merged(tmp_path / "merged")
    found = scan(tmp_path)
    assert {"checkpoint-2", "checkpoint-3", "checkpoint-6"} <= set(names(tmp_path / "run"))
    assert len(found["files"]) > 30
    assert (set(found["pickles"]), found["secrets"]) == ({"optimizer.pt", "scheduler.pt", "rng_state.pth"}, [])
    for path in [path for path in tmp_path.rglob("*") if path.name in found["pickles"]]:
        with safe_globals():  # of random states: NumPy's arrays
            torch.load(path, weights_only=True)
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err + "\n".join(log) + str(trainer.args) + repr(trainer.args)


def test_twin_the_scan_sees_what_stock_trainer_writes(runs, tmp_path):
    runs.make["esm"](tmp_path, trainer=Trainer, hub_token=SECRET).train()
    found = scan(tmp_path)
    assert set(found["pickles"]) == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert set(found["secrets"]) == {"training_args.bin"}
    (tmp_path / "bare").write_bytes(pickle.dumps({"a": 1}))
    assert is_pickle(tmp_path / "bare")
