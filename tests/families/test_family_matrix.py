"""Every family that recipes take, in every way to train: learns what it should, goes on exactly, comes back."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hub_server import serve_hub
from huggingface_hub import snapshot_download
from inside import MaskedLMArguments, build_affinity_model
from masked_lm_trainer import build_trainer
from protein_families import FAMILIES, MASKED_LMS, write_family
from run_outcomes import losses
from tiny_masked_lm import largest_weight_difference
from transformers import AutoModelForMaskedLM, BartConfig, DistilBertConfig, ViTConfig

from hf_ext import speedups
from hf_ext.data import STANDARD, DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.hub import push_folder
from hf_ext.masked_lm import steps as building
from hf_ext.models import PACKED_FAMILIES, LoraSettings, families, read_encoder
from hf_ext.property import AffinityArguments, AffinityPredictor, build_collator
from hf_ext.speedups import lora_settings
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "antigen"]
TOKEN = "hf_" + "matrix" * 5
TRAININGS = ("frozen", "lora", "full")
SETTINGS = {
    **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "remove_unused_columns": False},
    **{"per_device_train_batch_size": 3, "max_steps": 4, "learning_rate": 1e-2, "preset": "max_speed"},
    **{"save_strategy": "steps", "save_steps": 2, "without": ["compile", "data_loading", "cpu_threads"], "lora_r": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> its folder."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(name, root) for name in FAMILIES}


@pytest.fixture
def hub(monkeypatch):
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


def make_rows(num: int = 12) -> Dataset:
    drawn = torch.randint(20, (num, 2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [
        ["".join(STANDARD[i] for i in ids)[: 6 + (7 * row) % 14] for ids in pair] for row, pair in enumerate(drawn)
    ]
    labels = [pair[0].count("A") + 0.1 * row for row, pair in enumerate(pairs)]
    return Dataset.from_dict({"heavy": [a for a, _ in pairs], "antigen": [b for _, b in pairs], "label": labels})


def make_trainer(folder: str, training: str, output: Path, **given) -> FastTrainer:
    torch.manual_seed(0)
    settings = {**SETTINGS, "embedding_cache_dir": str(output.parent / "cache"), "use_peft": training == "lora"}
    args = FastTrainingArguments(output_dir=str(output), **settings, **given)
    affinity_args = AffinityArguments(
        encoders=[folder], tower_inputs=["heavy,antigen"], tower_training=[training], head_sizes=[8]
    )
    model = build_affinity_model(affinity_args, COLUMNS, lora_settings(args))
    return FastTrainer(model, args, build_collator(model, DataArguments(sequence_columns=COLUMNS)), make_rows())


def changed(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}


def test_the_matrix_has_every_family_that_is_served():
    assert set(FAMILIES) == set(families.FAMILIES)
    assert set(MASKED_LMS) < set(FAMILIES)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_trains_what_it_should_goes_on_exactly_and_comes_back(folders, hub, name, training, tmp_path):
    trainer = make_trainer(folders[name], training, tmp_path / "whole")
    packing = trainer.plan["packing"]
    is_cached = training == "frozen"
    assert (packing.status == "applied") == (name in PACKED_FAMILIES), packing
    assert trainer.plan.applied("embedding_cache") == is_cached
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert len(losses(trainer)) == 4
    moved = changed(trainer.model, before)
    inside = {name for name in moved if name.startswith("encoders.")}
    trains = {n for n, p in trainer.model.named_parameters() if p.requires_grad and n.startswith("encoders.")}
    assert bool(inside) == (training != "frozen")
    assert inside <= trains
    if training == "lora":
        assert all("lora_" in name for name in inside)
    if training == "full":
        assert len(inside) > 0.6 * len(trains)  # of heads that AutoModel brings along, none
        assert not any("embed_positions" in name or "contact_head" in name for name in inside)

    # As a command names it: what was measured by time is then as in the run before.
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = make_trainer(folders[name], training, tmp_path / "resumed", resume_from_checkpoint=checkpoint)
    resumed.train()
    assert largest_weight_difference(trainer.model, resumed.model) == 0

    trainer.save_model(str(tmp_path / "saved"))
    trainer.end()
    rows = [dict(row) for row in make_rows(4)]
    predictor = AffinityPredictor(trainer.model, trainer.data_collator)
    predictor.model.transform_encoders(speedups.fuse_gelu)  # the kernels of a saved model: others round otherwise
    predictor.model.transform_encoders(partial(speedups.set_attention, kernel="blocked"))
    expected = predictor.predict(rows)
    assert np.ptp(expected) > 0
    push_folder(tmp_path / "saved", "me/model", token=TOKEN)
    snapshot_download("me/model", token=TOKEN, local_dir=tmp_path / "back")
    saved, back = (AffinityPredictor.from_pretrained(tmp_path / name).predict(rows) for name in ("saved", "back"))
    np.testing.assert_array_equal(back, saved)
    # Beside adapters the run held its base weights in bf16.
    np.testing.assert_allclose(saved, expected, rtol=1e-3 if training == "lora" else 1e-6)


def make_masked_lm(folder: str, output: Path, **given) -> FastTrainer:
    """As `recipes/mlm.py` builds it."""
    torch.manual_seed(0)
    args = FastTrainingArguments(output_dir=str(output), **{**SETTINGS, **given})
    model_args = MaskedLMArguments(model_name_or_path=folder)
    model, tokenizer = building.build_model(model_args), building.build_tokenizer(model_args)
    data_args = DataArguments(sequence_columns=["heavy"])
    collator = building.build_collator(tokenizer, model, model_args, data_args, seed=0)
    splits = {"train": make_rows().remove_columns(["antigen", "label"])}
    return build_trainer(model, args, collator, splits, None)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("use_peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MASKED_LMS)
def test_masked_language_models(folders, name, use_peft, tmp_path):
    given = {"use_peft": use_peft, "gradient_accumulation_steps": 2}
    whole = make_masked_lm(folders[name], tmp_path / "whole", **given)
    assert (whole.plan["packing"].status == "applied") == (name in PACKED_FAMILIES)
    assert (whole.plan["masked_lm_head"].status == "applied") == (name in ("esm", "esmc", "bert"))
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = make_masked_lm(folders[name], tmp_path / "resumed", **given, resume_from_checkpoint=checkpoint)
    resumed.train()
    assert largest_weight_difference(whole.model, resumed.model) == 0
    stock = make_masked_lm(folders[name], tmp_path / "stock", **given, speedups=[], preset=None)
    stock.train()
    assert losses(whole) == pytest.approx(losses(stock), rel=0.02)  # in bf16, where that is faster
    whole.save_model(str(tmp_path / "saved"))
    if not use_peft:
        saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
        assert largest_weight_difference(whole.model, saved) == 0


def test_a_causal_model_is_no_masked_language_model(folders):
    with pytest.raises(ArgumentError, match="no masked language model there"):
        building.build_model(MaskedLMArguments(model_name_or_path=folders["gpt_neox"]))


def test_first_tokens_that_have_seen_nothing_are_no_pooling(folders):
    for name in ("gpt_neox", "t5", "mt5", "umt5"):
        given = AffinityArguments(encoders=[folders[name]], tower_inputs=["heavy,antigen"], pooling=["cls"])
        with pytest.raises(ArgumentError, match=f"type '{name}' does not stand for the sequence"):
            build_affinity_model(given, COLUMNS)


@pytest.mark.parametrize(
    "config", [DistilBertConfig(dim=16, hidden_dim=32, n_heads=2, n_layers=1), ViTConfig(), BartConfig()]
)
def test_other_families_are_refused_in_one_sentence_that_names_what_to_take(tmp_path, config):
    config.save_pretrained(tmp_path)
    remedy = r"Take ESM C \(biohub/ESMC-300M\), or train that model in a script of your own with FastTrainer"
    with pytest.raises(ArgumentError, match=f"type '{config.model_type}'; recipes take esm .*{remedy}"):
        read_encoder(str(tmp_path), None, "frozen", LoraSettings())
    with pytest.raises(ArgumentError, match=f"Model .* is of type '{config.model_type}'; recipes take .*{remedy}"):
        building.build_model(MaskedLMArguments(model_name_or_path=str(tmp_path)))


def test_models_with_code_of_their_own_are_refused_with_what_to_take(tmp_path):
    """AMPLIFY, ESM3, DPLM, Profluent-E1 and others: their architecture is not one of transformers."""
    config = {"model_type": "amplify", "auto_map": {"AutoConfig": "amplify.AMPLIFYConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "amplify.py").write_text("raise SystemExit('ran')")
    for read in (
        lambda: read_encoder(str(tmp_path), None, "frozen", LoraSettings()),
        lambda: building.build_model(MaskedLMArguments(model_name_or_path=str(tmp_path))),
    ):
        with pytest.raises(ArgumentError, match=r"code of its own, which is never run here.*ESMC-300M"):
            read()
