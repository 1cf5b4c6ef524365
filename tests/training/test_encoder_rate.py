"""Encoders that train get their own learning rate; everything else in the optimizer stays as Trainer made it."""

from dataclasses import asdict

import pytest
from miniature_esm import make_esm
from transformers import EsmForSequenceClassification, EsmModel

from hf_ext.errors import ArgumentError
from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


def make_groups(model, folder, **given) -> list[dict]:
    args = FastTrainingArguments(
        str(folder), use_cpu=True, report_to="none", learning_rate=1e-3, weight_decay=0.1, **given
    )
    return FastTrainer(model, args).create_optimizer().param_groups


def rates(groups) -> dict[int, float]:
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # no parameter twice
    return found


def test_encoder_and_head_have_their_own_rates_and_weight_decay_stays(make_affinity, tmp_path):
    model, _ = make_affinity("full", "frozen")
    plain = make_groups(model, tmp_path)
    groups = make_groups(model, tmp_path, encoder_learning_rate=1e-5)
    found = rates(groups)
    encoder = [p for p in model.encoders.parameters() if p.requires_grad]
    assert {found[id(p)] for p in encoder} == {1e-5}
    assert {found[id(p)] for p in model.head.parameters()} == {1e-3}
    assert found.keys() == rates(plain).keys()
    decay = [{id(p) for group in side for p in group["params"] if group["weight_decay"]} for side in (plain, groups)]
    assert decay[0] == decay[1]


def test_without_the_flag_there_is_one_rate(make_affinity, tmp_path):
    model, _ = make_affinity("full", "full")
    assert set(rates(make_groups(model, tmp_path)).values()) == {1e-3}


def test_a_generator_that_trains_its_encoder_has_two_rates_and_one_of_its_own_none(demo_encoders, tmp_path):
    spec = read_encoder(demo_encoders[1], None, "lora", LoraSettings())
    model = AntibodyGenerator(GeneratorConfig.of_size("esm", "tiny", antigen_encoder=asdict(spec)))
    found = rates(make_groups(model, tmp_path, encoder_learning_rate=1e-5))
    encoder = {id(p) for p in model.encoder.parameters() if p.requires_grad}
    assert {found[one] for one in encoder} == {1e-5}
    assert {found[one] for one in found.keys() - encoder} == {1e-3}
    with pytest.raises(ArgumentError, match="no encoder that trains"):
        make_groups(AntibodyGenerator(GeneratorConfig.of_size("lstm", "tiny")), tmp_path, encoder_learning_rate=1e-5)


def test_a_task_head_of_transformers_keeps_the_head_rate(tmp_path):
    model = make_esm(EsmForSequenceClassification, num_labels=1)
    found = rates(make_groups(model, tmp_path, encoder_learning_rate=1e-5))
    assert {found[id(p)] for p in model.classifier.parameters()} == {1e-3}
    assert {found[id(p)] for p in model.esm.encoder.parameters()} == {1e-5}


def test_adapters_count_as_encoder(tmp_path):
    wrapped = wrap_with_lora(make_esm(EsmForSequenceClassification, num_labels=1), LoraSettings(r=2))
    found = rates(make_groups(wrapped, tmp_path, encoder_learning_rate=1e-5))
    names = {name: found[id(p)] for name, p in wrapped.named_parameters() if p.requires_grad}
    assert {rate for name, rate in names.items() if "lora_" in name and "classifier" not in name} == {1e-5}
    assert {rate for name, rate in names.items() if "classifier" in name} == {1e-3}


@pytest.mark.parametrize("kind", ["frozen towers", "no head"])
def test_models_without_an_encoder_beside_a_head_are_refused(make_affinity, tmp_path, kind):
    model = make_affinity("frozen", "frozen")[0] if kind == "frozen towers" else make_esm(EsmModel)
    with pytest.raises(ArgumentError, match=r"--encoder_learning_rate.*no encoder that trains"):
        make_groups(model, tmp_path, encoder_learning_rate=1e-5)
