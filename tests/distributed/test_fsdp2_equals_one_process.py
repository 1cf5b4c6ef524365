"""FSDP2: the losses and weights of one process, killed runs that go on, and model folders that load bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from closeness import largest
from equal_cases import CASES, TOWERS, differences, load_numbers, make_esm, write_encoders
from equal_on_ranks import CHECKPOINTED, SAVED, SAVING, SHARDED_KILLS, train
from locations import HELPERS
from peft import PeftModel
from ranks import run_on_ranks
from safetensors.torch import load_file
from transformers import EsmcForMaskedLM, EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.models import AffinityModel

pytestmark = pytest.mark.nightly

SCRIPT = HELPERS / "equal_on_ranks.py"
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
CLOSE = 1e-4


def launch(folder: Path, task: str, environment: dict[str, str] = {}, **given) -> None:  # noqa: B006
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**FSDP2, **environment}.items():
            patch.setenv(name, value)
        run_on_ranks(SCRIPT, folder, task, limit_s=900, **given)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Every case in one process."""
    folder = tmp_path_factory.mktemp("fsdp2")
    write_encoders(folder / "encoders")
    for case in CASES:
        train(case, folder / f"alone-{case}", folder / "encoders", f"alone-{case}", **SAVING)
    return folder


@pytest.fixture(scope="module")
def trained(alone) -> Path:
    launch(alone, "train")
    return alone


@pytest.fixture(scope="module")
def resumed(trained) -> Path:
    """Where two processes were killed, and went on as two and as four."""
    for case in SHARDED_KILLS:
        launch(trained, f"kill:{case}", is_killed=True)
    launch(trained, "resume")
    launch(trained, "four", num_ranks=4)
    return trained


def load_saved(folder: Path, case: str) -> torch.nn.Module:
    """The model as a user loads it; every weight must be found."""
    if case == "lora":
        return PeftModel.from_pretrained(make_esm(EsmForSequenceClassification), folder)
    masked_lm = EsmcForMaskedLM if case == "esm_c" else EsmForMaskedLM
    model, info = (AffinityModel if case in TOWERS else masked_lm).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def differing(loaded: torch.nn.Module, gathered: dict[str, torch.Tensor]) -> list[str]:
    """Names of loaded weights that are not bit for bit those that the run gathered; referenced encoders have none."""
    weights = dict(loaded.named_parameters())
    assert len(weights) >= 4  # of a head alone
    names = {weight: weight.replace("encoder.embed_tokens", "shared") for weight in weights}  # T5's, one tensor or two
    return [weight for weight, known in names.items() if not torch.equal(weights[weight], gathered[known])]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_one_process_and_the_saved_model_loads_bit_for_bit(trained, case):
    losses, weights = load_numbers(trained, f"two-{case}")
    assert largest(differences((losses, weights), load_numbers(trained, f"alone-{case}"))) < CLOSE
    assert differing(load_saved(trained / f"two-{case}-saved", case), weights) == []


def test_louder_gradients_of_one_process_and_other_weights_are_seen(trained):
    assert min(differences(load_numbers(trained, "louder"), load_numbers(trained, "alone-masked_lm"))) > 3 * CLOSE
    loaded = load_saved(trained / "two-masked_lm-saved", "masked_lm")
    assert loaded.lm_head.decoder.weight is loaded.esm.embeddings.word_embeddings.weight  # saved once
    with torch.no_grad():
        loaded.lm_head.bias[3] += 1e-6
    assert differing(loaded, load_numbers(trained, "two-masked_lm")[1]) == ["lm_head.bias"]


def test_the_plan_says_how_the_model_was_split(trained):
    found = json.loads((trained / "about.json").read_text())
    assert found["masked_lm"]["status"] == "applied"
    reason = "FSDP2; layer by layer (EsmLayer); 2 weights of ESM's contact head are frozen"
    assert found["masked_lm"]["reason"].startswith(reason)
    assert found["masked_lm"]["split"] > 30
    assert found["masked_lm"]["whole"] == found["lora_towers"]["whole"] == 0  # the frozen tower too


@pytest.mark.parametrize("case", CHECKPOINTED)
def test_recomputed_activations_change_nothing(trained, case):
    ours = load_numbers(trained, f"recomputed-{case}")
    assert differences(ours, load_numbers(trained, f"two-{case}")) == (0.0, 0.0)


def test_the_best_weights_are_loaded_at_the_end_and_accelerate_merges_the_pieces(trained, tmp_path):
    merge_fsdp_weights(str(trained / "best" / f"checkpoint-{SAVED}" / "pytorch_model_fsdp_0"), str(tmp_path))
    merged, best = load_file(tmp_path / "model.safetensors"), load_numbers(trained, "best")[1]
    assert [name for name in best if not torch.equal(merged[name], best[name])] == []
    assert min(differences(load_numbers(trained, "best"), load_numbers(trained, "two-full"))[1:]) > CLOSE


@pytest.mark.parametrize("case", SHARDED_KILLS)
def test_a_killed_run_goes_on_as_if_nothing_was_and_on_four_processes_with_the_rows_that_were_left(resumed, case):
    whole = load_numbers(resumed, f"two-{case}")
    assert differences(load_numbers(resumed, f"resumed-{case}"), whole) == (0.0, 0.0)
    assert largest(differences(load_numbers(resumed, f"four-{case}"), whole)) < CLOSE


def test_bfloat16_sums_gradients_in_float32_and_a_head_on_cached_embeddings_stays_exact(alone, tmp_path):
    (tmp_path / "encoders").symlink_to(alone / "encoders")
    launch(tmp_path, "half", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    found = json.loads((tmp_path / "half.json").read_text())
    assert found["accelerate"] == 1.0  # what bfloat16 sums, bfloat16 holds
    assert found["ours"] < 0.9
    assert found["evidence"] == {"gradients_summed_in": "float32"}
    for case in CASES:
        pairs = [*zip(*(load_numbers(*place)[0] for place in ((tmp_path, f"half-{case}"), (alone, f"alone-{case}"))))]
        # Two roundings of bfloat16, before rows are read again and the difference grows.
        near = [abs(ours - loss) < loss * 2**-7 for ours, loss in pairs[:7]]
        assert largest(abs(a - b) for a, b in pairs) < CLOSE if case == "frozen_cache" else all(near), case
