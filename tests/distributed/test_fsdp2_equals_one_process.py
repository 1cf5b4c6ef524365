"""FSDP2 and HSDP: the losses and weights of one process, and model folders that load bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from closeness import largest
from equal_cases import CASES, TOWERS, differences, load_numbers, make_esm, make_trainer, save_numbers, write_encoders
from fsdp2_on_ranks import CHECKPOINTED, RECOMPUTING
from hub_server import serve_hub
from locations import HELPERS
from peft import PeftModel
from ranks import run_on_ranks
from sharded_launch import FSDP2
from transformers import EsmcForMaskedLM, EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.models.affinity import AffinityModel

pytestmark = pytest.mark.nightly

SCRIPT = HELPERS / "fsdp2_on_ranks.py"
HSDP = {  # two copies, each split over two processes
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
CLOSE = 1e-4
TOKEN = "hf_" + "canary" * 5 + "bird"


def launch(folder: Path, part: str, processes: int = 2, limit_s: float = 120, **extra: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**FSDP2, **extra}.items():
            patch.setenv(name, value)
        run_on_ranks(SCRIPT, folder, part, str(processes), limit_s=limit_s, num_ranks=processes)


def about(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}-about.json").read_text())


def load_saved(folder: Path, case: str) -> torch.nn.Module:
    """The model as a user loads it; every weight must be found."""
    if case == "lora":
        return PeftModel.from_pretrained(make_esm(EsmForSequenceClassification), folder)
    masked_lm = EsmcForMaskedLM if case == "esm_c" else EsmForMaskedLM
    model, info = (AffinityModel if case in TOWERS else masked_lm).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def differing(folder: Path, name: str, case: str) -> list[str]:
    """Names of loaded weights that are not bit for bit those that the run gathered; referenced encoders have none."""
    loaded = dict(load_saved(folder / f"{name}-saved", case).named_parameters())
    gathered = load_numbers(folder, name)[1]
    assert len(loaded) >= 4  # of a head alone
    names = {weight: weight.replace("encoder.embed_tokens", "shared") for weight in loaded}  # T5's, one tensor or two
    return [weight for weight, known in names.items() if not torch.equal(loaded[weight], gathered[known])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Every case in one process."""
    folder = tmp_path_factory.mktemp("fsdp2")
    write_encoders(folder / "encoders")
    for case in CASES:
        trainer = make_trainer(case, folder / f"alone-{case}", 1, folder / "encoders")
        trainer.train()
        save_numbers(folder, f"alone-{case}", trainer)
    return folder


@pytest.fixture(scope="module")
def fsdp2(alone) -> Path:
    launch(alone, "fsdp2", limit_s=900)
    return alone


@pytest.fixture(scope="module")
def hsdp(alone) -> Path:
    launch(alone, "hsdp", processes=4, limit_s=900, **HSDP)
    return alone


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_one_process(request, case, kind, record_property):
    folder = request.getfixturevalue(kind)
    expected = load_numbers(folder, f"alone-{case}")
    found = differences(load_numbers(folder, f"{kind}-{case}"), expected)
    name = {"fsdp2": "FSDP2, 2 processes", "hsdp": "HSDP, 2 x 2 processes"}[kind]
    record_property("same_numbers", (name, case, *found))
    assert largest(found) < CLOSE
    broken = differences(load_numbers(folder, f"{kind}-louder-{case}"), expected)  # one process's gradients twice
    assert min(broken) > 3 * CLOSE


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_loads_whole_and_bit_for_bit(request, case, kind):
    assert differing(request.getfixturevalue(kind), f"{kind}-{case}", case) == []


def test_the_plan_says_how_the_model_was_split_and_tied_weights_are_saved_once(fsdp2):
    found = about(fsdp2, "fsdp2-masked_lm")
    assert found["status"] == "applied"
    assert found["reason"].startswith("FSDP2; layer by layer (EsmLayer); 2 weights of ESM's contact head are frozen")
    assert (found["split"] > 30, found["whole"]) == (True, 0)
    loaded = load_saved(fsdp2 / "fsdp2-masked_lm-saved", "masked_lm")
    assert loaded.lm_head.decoder.weight is loaded.esm.embeddings.word_embeddings.weight
    with torch.no_grad():
        loaded.lm_head.bias[3] += 1e-6
    loaded.save_pretrained(fsdp2 / "broken-saved")  # the twin
    for kind in ("json", "safetensors"):
        shutil.copy(fsdp2 / f"fsdp2-masked_lm.{kind}", fsdp2 / f"broken.{kind}")
    assert differing(fsdp2, "broken", "masked_lm") == ["lm_head.bias"]


def test_a_push_sends_the_whole_weights_and_both_processes_hear_of_it(tmp_path, monkeypatch):
    with serve_hub(monkeypatch, TOKEN) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        launch(tmp_path, "push")
        branch = hub.repositories["me/sharded"].branches["main"]
    assert [json.loads((tmp_path / f"commit-{rank}.json").read_text()) for rank in (0, 1)] == [branch, branch]
    (tmp_path / "push-saved").rename(tmp_path / "saved")
    (tmp_path / "push").rename(tmp_path / "push-saved")  # the folder that was pushed, compared with the Hub's bytes
    assert differing(tmp_path, "push", "masked_lm") == []


@pytest.mark.parametrize("name", RECOMPUTING)
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_recomputed_activations_change_nothing(fsdp2, case, name):
    ours = load_numbers(fsdp2, f"fsdp2-{name}-{case}")
    assert differences(ours, load_numbers(fsdp2, f"fsdp2-{case}")) == (0.0, 0.0)


def test_bfloat16_sums_gradients_in_float32_and_a_head_on_cached_embeddings_stays_exact(alone, tmp_path):
    (tmp_path / "encoders").symlink_to(alone / "encoders")
    launch(tmp_path, "half", limit_s=900, ACCELERATE_MIXED_PRECISION="bf16")
    shares = json.loads((tmp_path / "shares.json").read_text())
    assert shares["accelerate"] == 1.0  # what bfloat16 sums, bfloat16 holds
    assert shares["ours"] < 0.9
    assert about(tmp_path, "half-masked_lm")["evidence"] == {"gradients_summed_in": "float32"}
    for case in CASES:
        loss, _ = differences(load_numbers(tmp_path, f"half-{case}"), load_numbers(alone, f"alone-{case}"))
        assert loss < (CLOSE if case == "frozen_cache" else 5e-3)
    assert about(tmp_path, "half-lora_towers")["whole"] == 0  # the frozen tower too, in its own float32
