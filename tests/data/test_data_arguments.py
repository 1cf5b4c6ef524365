import dataclasses
import shlex

import pytest
from transformers import HfArgumentParser

from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError


def test_every_argument_parses_from_the_command_line_and_has_help():
    parser = HfArgumentParser(DataArguments)
    line = (
        "--dataset_name a.csv --dataset_config_name c --dataset_revision main --streaming --label_column pKd "
        "--sequence_columns heavy light --censor_column censored --group_column antibody --id_column name "
        "--interval_by rows "
        "--split group:antibody --split_sizes 0.7 0.2 0.1 --split_seed 3 --max_train_samples 100 --bad_rows drop "
        "--stop_codon trim --gaps remove --max_residues 512 --too_long window "
        "--filter 'pKd > 7'"
    )
    (args,) = parser.parse_args_into_dataclasses(shlex.split(line))
    assert args.sequence_columns == ["heavy", "light"]
    assert args.split_sizes == [0.7, 0.2, 0.1]
    assert args.filter == "pKd > 7"
    assert args.split_group_column == "antibody"
    assert (args.max_residues, args.too_long) == (512, "window")
    assert all(field.metadata["help"] for field in dataclasses.fields(DataArguments))
    assert args.interval_by == "rows"
    assert len(dataclasses.fields(DataArguments)) == 25
    assert "--max_train_samples" in parser.format_help()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_rows": "ignore"}, "bad_rows='ignore': allowed are error, drop"),
        ({"max_residues": 0}, "max_residues=0: must be at least 1"),
        ({"sequence_columns": ["a", "a"]}, "each once"),
        ({"split": "random", "split_column": "part"}, "give one of them"),
        *(({"split": rule}, "use random, group:COLUMN or cluster") for rule in ("group", "group:", "random:x")),
        *(({"split_sizes": sizes}, "give three shares") for sizes in ([0.8, 0.2], [0.8, 0.1, 0.2], [1.2, -0.1, -0.1])),
        ({"cluster_column": "sequence"}, "only acts with --split cluster"),
        ({"split": "cluster", "cluster_column": "light"}, "one of sequence"),
        ({"split": "cluster", "streaming": True}, "drop --streaming"),
        ({"cluster_identity": 0.8}, "cluster_identity only acts with --split cluster"),
        ({"split": "cluster", "cluster_identity": 0.1}, "with MMseqs2 0.2 to 0.7"),
        ({"split": "cluster", "cluster_identity": 90.0}, "use 0.7 to 1"),
        ({"split": "cluster", "cluster_file": "x.tsv"}, "say with --id_column"),
        ({"split": "cluster", "cluster_file": "x", "id_column": "a", "cluster_identity": 0.9}, "finished clusters"),
        ({"group_column": "label"}, "column 'label' is one that loading writes"),
        ({"sequence_columns": ["source_row"]}, "column 'source_row' is one that loading writes"),
    ],
)
def test_malformed_or_contradicting_arguments_are_refused(values, message):
    with pytest.raises(ArgumentError) as error:
        DataArguments(**values)
    assert message in str(error.value)
