"""YAML files that unfold, never end, or hold what is no value: refused in no time, with file and line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hf_ext.comparing.sides import merge_yaml
from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.parser import FastArgumentParser
from hf_ext.training_args import FastTrainingArguments

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


def refusal(path: Path) -> str:
    parser = FastArgumentParser((DataArguments, FastTrainingArguments))
    start = time.process_time()
    with pytest.raises(ArgumentError) as error:
        parser.parse_args_into_dataclasses(["--config", str(path), "--output_dir", "x"])
    assert time.process_time() - start < 2  # measured: milliseconds; a bomb takes more than 40 s
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases (*name) are not read: write the value out in"),
        ("seed: &s 1\nsplit_seed: *s\n", "line 2, column 13"),
        ("a: &a\n  b: *a\n", "aliases"),
        ("a: &a [*a]\n", "aliases"),
        ("a:\n  <<: *b\n", "aliases"),
        ("seed: " + "9" * 5000 + "\n", "line 1: seed: the value cannot be read (Exceeds the limit"),
        ("output_dir: 2024-13-45\n", "line 1: output_dir: the value cannot be read (month must be"),
        ("seed: !!int ''\n", "tags (tag:yaml.org,2002:int) are not read"),
        ("seed: !!bool maybe\n", "tags (tag:yaml.org,2002:bool) are not read"),
        ("seed: !!python/object/apply:os.system ['true']\n", "tags (tag:yaml.org,2002:python/object/apply:os.system)"),
        ("seed: 0x_\n", "line 1: seed: '0x_' is not int"),
        ("seed: 1:30\n", "line 1: seed: '1:30' is not int"),
        ("seed: 1_0\n", "line 1: seed: '1_0' is not int"),
        ("seed: 0b11\n", "line 1: seed: '0b11' is not int"),
        ("seed: \u0663\n", "line 1: seed: '\u0663' is not int"),
        ("learning_rate: 1:30.5\n", "line 1: learning_rate: '1:30.5' is not float"),
        ("learning_rate: \u0663\n", "line 1: learning_rate: '\u0663' is not float"),
        ("seed:\t1\n\tfp16: true\n", "found character '\\t'"),
        ("[" * 5000, "nested too deeply"),
        ("seed: " + "[" * 5000, "nested too deeply"),
        ("seed: \0\n", "special characters are not allowed"),
        ("? [a, b]\n: 1\n", "line 1: a list or mapping is no field"),
        ("? {a: b}\n: 1\n", "line 1: a list or mapping is no field"),
        ("seed: 1\n---\nseed: 2\n", "expected a single document"),
        ("seed: 1\n" + "#" * 70_000, "larger than 64 KB"),
        ("just text\n", "the top level must be lines of 'field: value'"),
    ],
)
def test_a_hostile_yaml_file_is_refused_in_no_time(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    assert message in refusal(tmp_path / "run.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"seed: 1\nfilter: \xff\n")
    assert "can't decode byte 0xff" in refusal(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_bytes("seed: 1\n".encode("utf-16"))
    assert "can't decode byte 0xff" in refusal(tmp_path / "run.yaml")


def test_folders_pipes_and_devices_are_refused_at_once(tmp_path):
    assert "is a folder, not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "run.yaml")
    assert "is a named pipe, not a regular file" in refusal(tmp_path / "run.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    assert "is a device, not a regular file" in refusal(tmp_path / "zero.yaml")


def test_the_sides_of_a_comparison_are_read_by_the_same_rules(tmp_path):
    (tmp_path / "a.yaml").write_text(BOMB)
    (tmp_path / "b.yaml").write_text("seed: 1\nlearning_rate: 1e-3\nfp16: no\n")
    for below, above in (("a", "b"), ("b", "a")):
        with pytest.raises(ArgumentError, match=r"a\.yaml: not valid YAML: aliases"):
            merge_yaml(str(tmp_path / f"{below}.yaml"), str(tmp_path / f"{above}.yaml"))
    assert merge_yaml(str(tmp_path / "b.yaml"), str(tmp_path / "b.yaml")) == "seed: 1\nlearning_rate: 1e-3\nfp16: no\n"


def test_anchors_without_an_alias_and_a_byte_order_mark_do_no_harm(tmp_path):
    (tmp_path / "run.yaml").write_text("\ufeffseed: &s 7\n", encoding="utf-8")
    parser = FastArgumentParser((DataArguments, FastTrainingArguments))
    args = parser.parse_args_into_dataclasses(["--config", str(tmp_path / "run.yaml"), "--output_dir", "x"])[1]
    assert args.seed == 7


def test_numbers_mean_in_yaml_what_they_mean_on_the_command_line(tmp_path):
    """010 is ten, as there; YAML 1.1 reads it as eight."""
    text = "seed: 010\nlearning_rate: 1e-3\nweight_decay: .5\nmax_grad_norm: .inf\nadam_beta1: 0\nnum_train_epochs: 2\n"
    (tmp_path / "run.yaml").write_text(text)
    parser = FastArgumentParser((DataArguments, FastTrainingArguments))
    args = parser.parse_args_into_dataclasses(["--config", str(tmp_path / "run.yaml"), "--output_dir", "x"])[1]
    assert (args.seed, args.learning_rate, args.weight_decay, args.num_train_epochs) == (10, 0.001, 0.5, 2)
    assert args.max_grad_norm == float("inf")


@pytest.mark.parametrize("words", ["--seed \u0663", "--seed 1_0", "--learning_rate \u0663", "--learning_rate 1_0.5"])
def test_numbers_on_the_command_line_are_ascii(words):
    with pytest.raises(ArgumentError, match=r"invalid (int|float) value"):
        FastArgumentParser((DataArguments, FastTrainingArguments)).parse_args_into_dataclasses(
            ["--output_dir", "x", *words.split()]
        )


def test_files_of_settings_that_are_not_there_are_errors_of_ours():
    for words in ("--accelerator_config nope.json", "--deepspeed nope.json"):
        with pytest.raises((ArgumentError, ImportError)) as error:
            FastArgumentParser((DataArguments, FastTrainingArguments)).parse_args_into_dataclasses(
                ["--output_dir", "x", *words.split()]
            )
        assert "nope.json" in str(error.value) or isinstance(error.value, ImportError)
