"""What YAML offers beyond `field: value` is refused, with file and line; numbers are those of the command line."""

from __future__ import annotations

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


def parse(folder: Path, *words: str) -> FastTrainingArguments:
    parser = FastArgumentParser((DataArguments, FastTrainingArguments))
    return parser.parse_args_into_dataclasses(["--config", str(folder / "run.yaml"), "--output_dir", "x", *words])[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "run.yaml line 2: tags and aliases are not read: write the value out"),
        ("seed: &s 1\nsplit_seed: *s\n", "run.yaml line 2: tags and aliases"),
        ("seed: !!python/object/apply:os.system ['true']\n", "run.yaml line 1: tags and aliases"),
        ("seed:\t1\n\tfp16: true\n", "found character '\\t'"),
        ("seed: " + "[" * 5000, "not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "expected a single document"),
        ("just text\n", "the top level must be lines of 'field: value'"),
        ("seed: 0x_\n", "line 1: seed: '0x_' is not int"),
        ("seed: 1:30\n", "line 1: seed: '1:30' is not int"),
    ],
)
def test_what_is_more_than_plain_yaml_is_refused(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ArgumentError) as error:
        parse(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / "run.yaml") in str(error.value)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes("seed: 1\n".encode("utf-16"))
    with pytest.raises(ArgumentError, match="can't decode byte 0xff"):
        parse(tmp_path)
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "run.yaml").mkdir()
    with pytest.raises(ArgumentError, match="Is a directory"):
        parse(tmp_path)


def test_the_sides_of_a_comparison_are_read_by_the_same_rules(tmp_path):
    (tmp_path / "a.yaml").write_text(BOMB)
    (tmp_path / "b.yaml").write_text("seed: 1\nlearning_rate: 1e-3\nfp16: no\n")
    for below, above in (("a", "b"), ("b", "a")):
        with pytest.raises(ArgumentError, match=r"a\.yaml line 2: tags and aliases"):
            merge_yaml(str(tmp_path / f"{below}.yaml"), str(tmp_path / f"{above}.yaml"))
    assert merge_yaml(str(tmp_path / "b.yaml"), str(tmp_path / "b.yaml")) == "seed: 1\nlearning_rate: 1e-3\nfp16: no\n"


def test_numbers_mean_in_yaml_what_they_mean_on_the_command_line(tmp_path):
    """010 is ten, as there; YAML 1.1 reads it as eight. Anchors without an alias and a byte order mark do no harm."""
    text = (
        "seed: &s 010\nlearning_rate: 1e-3\nweight_decay: .5\nmax_grad_norm: .inf\nadam_beta1: 0\nnum_train_epochs: 2\n"
    )
    (tmp_path / "run.yaml").write_text(f"\ufeff{text}", encoding="utf-8")
    args = parse(tmp_path)
    assert (args.seed, args.learning_rate, args.weight_decay, args.num_train_epochs) == (10, 0.001, 0.5, 2)
    assert args.max_grad_norm == float("inf")


def test_files_of_settings_that_are_not_there_are_errors_of_ours(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    for words in ("--accelerator_config nope.json", "--deepspeed nope.json"):
        with pytest.raises((ArgumentError, ImportError)) as error:
            parse(tmp_path, *words.split())
        assert "nope.json" in str(error.value) or isinstance(error.value, ImportError)
