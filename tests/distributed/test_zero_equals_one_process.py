"""ZeRO-2 and ZeRO-3 with offload in two processes: one process's numbers, exact resumes, folders that load."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from closeness import largest
from equal_cases import differences, load_numbers, make_esm, make_trainer, train, write_encoders
from launcher_files import FOLDER
from locations import HELPERS, ROOT
from peft import PeftModel
from run_outcomes import losses
from safetensors.torch import load_file
from transformers import EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.errors import CheckpointError
from hf_ext.models import AffinityModel

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason='pip install -e ".[deepspeed]"'),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="on GPUs: benchmarks/distributed_smoke.py"),
]
CASES = ("full", "lora", "frozen_cache", "masked_lm")
FLAGS = {2: ("--zero_stage", "2"), 3: ("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")}


def launch(stage: int, folder: Path, mode: str, processes: int = 2) -> None:
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(FOLDER / "zero3.yaml"),
        *FLAGS[stage],
    ]
    script = [str(HELPERS / "zero_on_ranks.py"), str(folder), mode]
    command = [*launcher, "--num_processes", str(processes), "--mixed_precision", "no", *script]
    paths = os.pathsep.join([str(ROOT), str(HELPERS)])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "CUDA_", "FSDP_"))}
    done = subprocess.run(command, env={**clean, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, tuple]:
    """Losses and weights of one process, by case."""
    folder = tmp_path_factory.mktemp("alone")
    write_encoders(folder / "encoders")
    runs = {case: train(case, folder / case, 1, folder / "encoders") for case in CASES}
    weights = {case: {n: p.detach() for n, p in run.model.named_parameters()} for case, run in runs.items()}
    return {case: (losses(run), weights[case]) for case, run in runs.items()}


@pytest.fixture(scope="module", params=[2, 3])
def trained(request, tmp_path_factory) -> tuple[int, Path]:
    """Stage, and where two processes trained all cases."""
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    write_encoders(folder / "encoders")
    launch(request.param, folder, "whole")
    return request.param, folder


def read(trained) -> list[dict]:
    return [json.loads((trained[1] / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_one_process(trained, alone, case):
    stage, folder = trained
    found = differences(load_numbers(folder, f"{case}-whole"), alone[case])
    assert largest(found) < 1e-4
    if stage == 3 and case != "frozen_cache":  # whose head is small enough to stay whole
        assert read(trained)[0][case]["share"] < 0.9
    assert read(trained)[0][case]["optimizer"] == {2: "AdamW", 3: "DeepSpeedCPUAdam"}[stage]


def test_gradients_that_count_twice_are_told_apart(trained, alone):
    loss, weight = differences(load_numbers(trained[1], "broken"), alone["masked_lm"])
    assert loss > 1e-3
    assert weight > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_from_the_tenth_step_ends_bit_for_bit_alike(trained, case):
    for own in read(trained):
        assert own[case]["same_weights"]
        assert own[case]["same_losses"]


def test_a_checkpoint_is_one_folder_under_one_manifest(trained):
    folder = trained[1] / "masked_lm" / "checkpoint-10"
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == listed | {"manifest.json"}
    assert {"scheduler.pt", "trainer_state.json", "latest"} < found, found
    assert len([name for name in found if "optim_states" in name]) == 2


def test_the_saved_model_loads_whole_and_bit_for_bit_in_float32(trained):
    folder = trained[1]
    loaded, info = EsmForMaskedLM.from_pretrained(folder / "masked_lm", output_loading_info=True)
    assert not info["missing_keys"]
    models = {"masked_lm": loaded, "full": AffinityModel.from_pretrained(folder / "full")}
    models["lora"] = PeftModel.from_pretrained(make_esm(EsmForSequenceClassification), folder / "lora")
    models["frozen_cache"] = AffinityModel.from_pretrained(folder / "frozen_cache")
    for case, model in models.items():
        weights = load_numbers(folder, f"{case}-whole")[1]
        found = dict(model.named_parameters())
        assert found.keys() >= weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights), case
    stored = load_file(folder / "masked_lm" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert "lm_head.decoder.weight" not in stored  # tied: one tensor


def test_what_would_train_otherwise_or_unpickle_a_stranger_is_refused(trained):
    found = read(trained)[1]["refused"]
    assert "ZeRO hands the optimizer flat slices" in found["muon"]
    assert "reads its files in a way that can run anything" in found["elsewhere"]
    assert "sha256" in found["damaged"]
    if trained[0] == 3:
        assert "would step DeepSpeed's CPU Adam, not --optim sgd" in found["sgd"]


def test_another_number_of_processes_or_none_of_deepspeed_is_refused_with_the_alternative(trained, tmp_path):
    stage, folder = trained
    launch(stage, folder, "alone", processes=1)
    message = json.loads((folder / "alone.json").read_text())
    assert f"in the files of ZeRO-{stage} on 2 processes" in message
    assert "start a new run from its weights" in message
    trainer = make_trainer("masked_lm", folder / "masked_lm", 1, folder / "encoders")
    with pytest.raises(CheckpointError, match=r"files of ZeRO-. on 2 processes.*this run reads those of Trainer"):
        trainer.train(resume_from_checkpoint=str(folder / "masked_lm" / "checkpoint-10"))


def test_an_infinite_loss_of_one_process_reaches_no_weight(trained):
    for own in read(trained):
        assert "step 3" in own["stop"]["message"]
        assert "The weights were not touched" in own["stop"]["message"]
        assert own["stop"]["finite"]
        assert own["stop"]["steps"] == 2
