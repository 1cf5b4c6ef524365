"""Names of other programs: what their scripts call an argument stays theirs, or leads to ours."""

import dataclasses
from dataclasses import dataclass, field

import pytest
from transformers import HfArgumentParser

from hf_ext import FastArgumentParser, FastTrainingArguments
from hf_ext.affinity.arguments import AffinityArguments, EvaluateArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.errors import ArgumentError
from hf_ext.generation.sample import SampleArguments
from hf_ext.masked_lm.arguments import MaskedLMArguments


@dataclass
class ScriptArguments:
    """As in the example scripts of transformers."""

    model_name_or_path: str = field(default="m", metadata={"help": "Path."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Truncate the evaluation set."})


def make(task: type) -> FastArgumentParser:
    return FastArgumentParser((task, DataArguments, FastTrainingArguments))


def test_a_script_of_hugging_face_parses_with_only_the_import_swapped():
    words = "--output_dir out --use_cpu --max_eval_samples 7 --speedups all --preset low_disk+low_memory"
    parser = HfArgumentParser((ScriptArguments, FastTrainingArguments))
    script, args = parser.parse_args_into_dataclasses(
        [*words.split(), "--gradient_accumulation_steps", "2"], look_for_args_file=False
    )
    assert (script.max_eval_samples, args.eval_subset, args.speedups) == (7, None, ["all"])
    assert (args.save_total_limit, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1, 1, 2)


def test_names_of_other_programs_are_answered_with_the_right_flag(tmp_path):
    meant = {
        "learning_rate": ["--lr", "--learning_rat"],
        "per_device_train_batch_size": ["--batch_size", "--batch-size", "--bs"],
        "gradient_accumulation_steps": ["--grad_accum"],
        "num_train_epochs": ["--epochs", "--num_epochs"],
        "speedups": ["--optim_ext", "--find_batch_size"],
        "early_stopping_patience": ["--patience"],
        "head_dropout": ["--dropout"],
        "split_sizes": ["--test_size"],
        "encoders": ["--model", "--model_name_or_path"],
        "dataset_name": ["--data", "--dataset"],
        "label_column": ["--label", "--target"],
        "output_dir": ["--output", "--out"],
        "eval_subset": ["--max_eval_samples"],
    }
    parser = make(AffinityArguments)
    for flag, others in meant.items():
        for other in others:
            with pytest.raises(ArgumentError, match=rf"unknown argument '{other}', did you mean '--{flag}'\?"):
                parser.parse_args_into_dataclasses([other, "3"])
    (tmp_path / "a.yaml").write_text("lr: 1e-3\n")
    with pytest.raises(ArgumentError, match=r"unknown key 'lr', did you mean 'learning_rate'\?"):
        parser.parse_args_into_dataclasses(["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(ArgumentError, match=r"'--model', did you mean '--model_name_or_path'\?"):
        make(MaskedLMArguments).parse_args_into_dataclasses(["--model", "x"])


def test_a_flag_of_another_command_names_that_command():
    parser = make(AffinityArguments)
    owners = {
        "doctor": (DoctorArguments, ["device", "json"]),
        "evaluate": (EvaluateArguments, ["test_of"]),
        "sample": (SampleArguments, ["antigen", "num_samples"]),
        "mlm": (MaskedLMArguments, ["model_size"]),
    }
    for command, (owner, names) in owners.items():
        assert set(names) <= {field.name for field in dataclasses.fields(owner)}
        for name in names:
            with pytest.raises(ArgumentError, match=rf"'--{name}', did you mean that of `hf-ext {command}`\?"):
                parser.parse_args_into_dataclasses([f"--{name}", "x"])
