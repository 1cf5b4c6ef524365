"""recipes/configs/generate_*.yaml: every key is one that is known, and the plan is right on the card in their names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from transformers import EsmConfig

from hf_ext.generation.preparing import settle_columns
from hf_ext.generation.stages import settle_stage
from hf_ext.hardware import describe_hardware
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.plan import make_plan
from hf_ext.running import parse_command

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("generate_*.yaml"))


@pytest.fixture(scope="module")
def recipe():
    return runpy.run_path(str(ROOT / "recipes" / "generate_antibody.py"))


def resolve(recipe, path, folder, *given):
    words = ["--config", str(path), "--output_dir", str(folder), "--use_cpu", "true", *given]
    parser, parsed = parse_command(recipe["TYPES"], recipe["DEFAULTS"], None, words)
    changed = settle_stage(int(parsed[0].stage), *parsed, parser.explicit)
    settle_columns(parsed[0], parsed[1], parser.explicit)
    return parsed, changed


def make_model(args):
    """Without weights, on an encoder of ESM-2 35M's shape."""
    shape = EsmConfig(vocab_size=33, hidden_size=480, num_hidden_layers=12, num_attention_heads=20, pad_token_id=1)
    spec = {"name_or_path": args.antigen_encoder, "config": shape.to_dict(), "training": args.encoder_training}
    with torch.device("meta"):
        return AntibodyGenerator(GeneratorConfig.of_size(args.architecture, args.size, antigen_encoder=spec))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_it_is_the_full_decoder_of_stage_3_on_a_frozen_encoder(recipe, path, tmp_path):
    (model_args, data_args, args), changed = resolve(recipe, path, tmp_path)
    assert (model_args.stage, model_args.size, model_args.encoder_training) == ("3", "full", "frozen")
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128
    assert (args.num_train_epochs, args.early_stopping_patience) == (50, 5)  # of the stage
    assert "size" not in changed
    assert data_args.cluster_column == "antigen"
    model = make_model(model_args)
    assert len(model.decoder.stack.block) == 6
    assert model.encoder.width == 480
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 25e6 < trained < 26e6  # 6 layers of 8 x 512^2 + 2 x 512 x 2048, and what stands around them


@pytest.mark.parametrize(
    ("name", "card", "precision"), [("generate_t4", "t4", "fp16"), ("generate_a100", "a100-80gb", "bf16")]
)
def test_the_plan_on_its_card_refuses_nothing_and_takes_its_half_precision(recipe, tmp_path, name, card, precision):
    (model_args, _, args), _ = resolve(recipe, ROOT / "recipes" / "configs" / f"{name}.yaml", tmp_path)
    plan = make_plan(args, make_model(model_args), hardware=describe_hardware(card))
    assert [one.name for one in plan.decisions if one.status == "refused"] == []
    (chosen,) = [one for one in plan.decisions if one.name == "precision"]
    assert chosen.status == "applied"
    assert precision in chosen.reason


def test_what_the_card_cannot_do_is_refused(recipe, tmp_path):
    """The twin: bfloat16 on a T4."""
    path = ROOT / "recipes" / "configs" / "generate_t4.yaml"
    (model_args, _, args), _ = resolve(recipe, path, tmp_path, "--bf16", "true")
    plan = make_plan(args, make_model(model_args), hardware=describe_hardware("t4"))
    assert [one.name for one in plan.decisions if one.status == "refused"] == ["precision"]


def test_there_are_two():
    assert [path.stem for path in CONFIGS] == ["generate_a100", "generate_t4"]
