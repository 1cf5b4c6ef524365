"""Other dataclasses of a command line may have arguments of the names that some of ours have."""

import copy
import dataclasses
import importlib
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.argument_names import SHORT_NAMES
from hf_ext.checkpoints.agreement.run_facts import describe_run
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.errors import ArgumentError
from hf_ext.generation.sample_arguments import SampleArguments
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.parser import FastArgumentParser
from hf_ext.training_args import FastTrainingArguments


@dataclass
class ModelArguments:
    """As in the example scripts for classification and language modelling."""

    model_name_or_path: str = field(default="m", metadata={"help": "Path."})


@dataclass
class DataTrainingArguments:
    """As there: the three limits that each of the five scripts has."""

    max_train_samples: int | None = None
    max_eval_samples: int | None = field(default=None, metadata={"help": "Truncate the evaluation set."})
    max_predict_samples: int | None = None


@dataclass
class ModelConfig:
    """What trl's class of this name has in common with ours."""

    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False


SCRIPT = (ModelArguments, DataTrainingArguments, FastTrainingArguments)
HERE = ["--output_dir", "out", "--use_cpu"]


def test_a_script_of_hugging_face_parses_with_only_the_import_swapped():
    given = [*HERE, "--max_eval_samples", "7", "--speedups", "all", "--without", "lora"]
    _, data, args = HfArgumentParser(SCRIPT).parse_args_into_dataclasses(given, look_for_args_file=False)
    assert (data.max_eval_samples, args.max_eval_samples) == (7, None)
    assert (args.speedups, args.without) == (["all"], ["lora"])


def test_ours_is_reachable_beside_it():
    given = [*HERE, "--max_eval_samples_ext", "0.05", "--max-eval-samples", "7"]
    _, data, args = HfArgumentParser(SCRIPT).parse_args_into_dataclasses(given, look_for_args_file=False)
    assert (data.max_eval_samples, args.max_eval_samples) == (7, 0.05)
    assert "max_eval_samples" in args.explicit_fields


@pytest.mark.parametrize("order", [(ModelConfig, FastTrainingArguments), (FastTrainingArguments, ModelConfig)])
def test_a_model_config_with_lora_parses_beside_ours(order):
    given = [*HERE, "--use_peft", "--lora_r", "4", "--lora_target_modules", "query", "--lora_r_ext", "2"]
    parsed = HfArgumentParser(order).parse_args_into_dataclasses(given, look_for_args_file=False)
    config, args = sorted(parsed, key=lambda one: type(one) is FastTrainingArguments)
    assert (config.use_peft, config.lora_r, config.lora_target_modules) == (True, 4, ["query"])
    assert (args.use_peft, args.lora_r, args.lora_target_modules) == (False, 2, None)


def test_without_another_class_the_short_flags_mean_ours():
    given = [*HERE, "--max_eval_samples", "0.5", "--use_peft", "--lora_r", "4"]
    (args,) = HfArgumentParser(FastTrainingArguments).parse_args_into_dataclasses(given, look_for_args_file=False)
    assert (args.max_eval_samples, args.use_peft, args.lora_r) == (0.5, True, 4)


def test_no_other_field_of_ours_is_in_a_class_it_is_parsed_with():
    added = {f.name for f in dataclasses.fields(FastTrainingArguments)}
    added -= {f.name for f in dataclasses.fields(TrainingArguments)}
    trl = pytest.importorskip("trl", reason="trl is not installed")
    for cls in (trl.ModelConfig, trl.ScriptArguments, trl.SFTConfig):
        assert not added & {f.name for f in dataclasses.fields(cls)}


def test_the_real_parser_of_trl_parses_all_three():
    trl = pytest.importorskip("trl", reason="trl is not installed")

    @dataclass
    class Arguments(trl.SFTConfig, FastTrainingArguments):
        pass

    parser = trl.TrlParser((trl.ScriptArguments, Arguments, trl.ModelConfig))
    given = [*HERE, "--dataset_name", "d", "--use_peft", "--lora_r", "4", "--lora_r_ext", "2", "--speedups", "all"]
    script, args, model = parser.parse_args_and_config(given)
    assert (script.dataset_name, model.use_peft, model.lora_r) == ("d", True, 4)
    assert (args.use_peft, args.lora_r, args.speedups) == (False, 2, ["all"])


# --- our own parser --------------------------------------------------------------------------------------------------


def test_our_parser_has_the_short_flags_and_keys(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("use_peft: true\nlora_r: 4\n")
    parser = FastArgumentParser(FastTrainingArguments, presets={"quick": {"max_eval_samples": 0.05}})
    (args,) = parser.parse_args_into_dataclasses(
        [*HERE, "--config", str(config), "--preset", "quick", "--lora-alpha", "8"]
    )
    assert (args.use_peft, args.lora_r, args.lora_alpha, args.max_eval_samples) == (True, 4, 8, 0.05)
    assert parser.explicit >= {"use_peft", "lora_r", "lora_alpha"}
    assert parser.origins["max_eval_samples"] == "preset quick"
    assert not [name for name in parser.origins if name.removesuffix("_ext") in SHORT_NAMES and name.endswith("_ext")]
    args.mark_explicit(parser.explicit)
    assert "lora_r" in args.explicit_fields
    with pytest.raises(ArgumentError, match=r"unknown argument '--lora_r_ext'.*did you mean '--lora_r'"):
        parser.parse_args_into_dataclasses([*HERE, "--lora_r_ext", "4"])


def test_names_of_other_programs_are_answered_with_the_right_flag(tmp_path):
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments))
    meant = {
        "learning_rate": ["--lr", "--learning_rat"],
        "per_device_train_batch_size": ["--batch_size", "--batch-size", "--bs"],
        "num_train_epochs": ["--epochs", "--num_epochs"],
        "weight_decay": ["--wd"],
        "warmup_steps": ["--warmup"],
        "encoders": ["--model", "--model_name_or_path"],
        "dataset_name": ["--data", "--dataset"],
        "label_column": ["--label", "--target"],
        "sequence_columns": ["--sequence"],
        "output_dir": ["--output", "--out"],
    }
    for flag, others in meant.items():
        for other in others:
            with pytest.raises(ArgumentError, match=rf"unknown argument '{other}', did you mean '--{flag}'\?"):
                parser.parse_args_into_dataclasses([other, "3"])
    (tmp_path / "a.yaml").write_text("lr: 1e-3\n")
    with pytest.raises(ArgumentError, match=r"unknown key 'lr', did you mean 'learning_rate'\?"):
        parser.parse_args_into_dataclasses(["--config", str(tmp_path / "a.yaml")])
    masked = FastArgumentParser((MaskedLMArguments, DataArguments, FastTrainingArguments))
    with pytest.raises(ArgumentError, match=r"'--model', did you mean '--model_name_or_path'\?"):
        masked.parse_args_into_dataclasses(["--model", "x"])


def test_a_flag_of_another_command_names_that_command():
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments))
    evaluate = importlib.import_module("hf_ext.recipes.evaluate")
    owners = {
        "doctor": (DoctorArguments, ["device", "plan_scale", "gpus", "json"]),
        "evaluate": (evaluate.EvaluateArguments, ["test_of"]),
        "sample": (SampleArguments, ["antigen", "num_samples"]),
    }
    for command, (owner, names) in owners.items():
        assert set(names) <= {field.name for field in dataclasses.fields(owner)}
        for name in names:
            with pytest.raises(ArgumentError, match=rf"'--{name}', did you mean that of `hf-ext {command}`\?"):
                parser.parse_args_into_dataclasses([f"--{name}", "x"])


def test_our_parser_leaves_the_short_name_to_a_script_that_has_it():
    parser = FastArgumentParser(SCRIPT)
    given = [*HERE, "--max_eval_samples", "7", "--max_eval_samples_ext", "0.05", "--lora_r", "2"]
    _, data, args = parser.parse_args_into_dataclasses(given)
    assert (data.max_eval_samples, args.max_eval_samples, args.lora_r) == (7, 0.05, 2)


# --- Python ----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "max_eval_samples": 9,
    "use_peft": True,
    "lora_r": 3,
    "lora_alpha": 5,
    "lora_dropout": 0.25,
    "lora_target_modules": ["query"],
    "use_rslora": True,
    "use_dora": True,
    "load_in_8bit": True,
    "load_in_4bit": True,
}


def test_every_short_name_is_a_keyword_and_an_attribute():
    assert set(VALUES) == set(SHORT_NAMES)
    args = FastTrainingArguments("out", use_cpu=True, **VALUES)
    assert {name: getattr(args, name) for name in VALUES} == VALUES
    assert {name: getattr(args, f"{name}_ext") for name in VALUES} == VALUES
    assert args.explicit_fields >= set(VALUES)
    args.lora_r = 7
    assert (args.lora_r, args.lora_r_ext) == (7, 7)
    plain = FastTrainingArguments("out", use_cpu=True)
    assert (plain.lora_r, plain.max_eval_samples, plain.use_peft) == (8, None, False)


def test_both_names_at_once_are_refused():
    with pytest.raises(TypeError, match="lora_r and lora_r_ext are one argument"):
        FastTrainingArguments("out", use_cpu=True, lora_r=1, lora_r_ext=2)


def test_derived_classes_copies_and_replacements_keep_them():
    @dataclass
    class Mine(FastTrainingArguments):
        extra: int = 0

    args = Mine("out", use_cpu=True, extra=2, **VALUES)
    for other in (args, copy.copy(args), dataclasses.replace(args, extra=3), pickle.loads(pickle.dumps(Plain.make()))):
        assert {name: getattr(other, name) for name in VALUES} == VALUES
    assert dataclasses.replace(args, lora_r_ext=1).lora_r == 1


class Plain:
    @staticmethod
    def make() -> FastTrainingArguments:
        return FastTrainingArguments("out", use_cpu=True, **VALUES)


def test_records_have_the_short_names():
    args = Plain.make()
    written = args.to_dict()
    assert {name: written[name] for name in VALUES} == VALUES
    assert not [name for name in written if name.removesuffix("_ext") in SHORT_NAMES and name.endswith("_ext")]
    assert FastTrainingArguments(**written).to_dict() == written
    facts = describe_run(args, None, None, None, 1, None)["arguments"]
    assert {name: facts[name] for name in VALUES} == VALUES
