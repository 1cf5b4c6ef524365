"""recipes/configs/generate_antibody.yaml: every key is one that is known, and the plan is right on each card."""

from pathlib import Path

import pytest
import torch
from transformers import EsmConfig

from hf_ext.generation.preparing import settle_columns
from hf_ext.generation.stages import settle_stage
from hf_ext.generation.task import TASK
from hf_ext.hardware import describe_hardware
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.plan import make_plan
from hf_ext.running import parse_command

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
A100 = ("--per_device_train_batch_size", "128", "--per_device_eval_batch_size", "256")
CARDS = {"a100-80gb": ("bf16", 1, A100), "t4": ("fp16", 8, ())}  # half precision, passes of a step, flags


@pytest.mark.parametrize("card", CARDS)
def test_it_is_the_full_decoder_of_stage_3_on_a_frozen_encoder_as_its_card_can_train_it(card, tmp_path):
    precision, passes, flags = CARDS[card]
    words = [
        "--config",
        str(CONFIGS / "generate_antibody.yaml"),
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "true",
        *flags,
    ]

    def resolve(*given):
        parser, parsed = parse_command(TASK.all_arguments, TASK.defaults, None, [*words, *given])
        changed = settle_stage(int(parsed[0].stage), *parsed, parser.explicit)
        settle_columns(parsed[0], parsed[1], parser.explicit)
        return changed, *parsed

    changed, model_args, data_args, args = resolve()
    assert (model_args.stage, model_args.size, model_args.encoder_training) == ("3", "full", "frozen")
    assert args.effective_batch_size == args.per_device_train_batch_size * passes == 128
    assert (args.num_train_epochs, args.early_stopping_patience) == (50, 5)  # of the stage
    assert "size" not in changed
    assert data_args.cluster_column == "antigen"
    # Without weights, on an encoder of ESM-2 35M's shape.
    shape = EsmConfig(vocab_size=33, hidden_size=480, num_hidden_layers=12, num_attention_heads=20, pad_token_id=1)
    spec = {"name_or_path": model_args.antigen_encoder, "config": shape.to_dict(), "training": "frozen"}
    with torch.device("meta"):
        model = AntibodyGenerator(GeneratorConfig.of_size(model_args.architecture, "full", antigen_encoder=spec))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 25e6 < trained < 26e6  # 6 layers of 8 x 512^2 + 2 x 512 x 2048, and what stands around them

    plan = make_plan(args, model, hardware=describe_hardware(card))
    assert [one.name for one in plan.decisions if one.status == "refused"] == []
    assert plan["precision"].status == "applied"
    assert precision in plan["precision"].reason
    if card == "t4":  # the twin: bfloat16 there
        *_, args = resolve("--bf16", "true")
        plan = make_plan(args, model, hardware=describe_hardware(card))
        assert [one.name for one in plan.decisions if one.status == "refused"] == ["precision"]
