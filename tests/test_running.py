"""What tasks share: the limit of learned positions, and what a plot that cannot be drawn leaves of a run.

Reading commands, checking inputs and the pages at the end are tested with the recipes, and with each task.
"""

import logging

import pytest

from hf_ext.arguments import parse_command
from hf_ext.errors import DataError
from hf_ext.models import limit_of_positions
from hf_ext.property import AffinityArguments
from hf_ext.tasks import plots_if_possible
from hf_ext.training_args import FastTrainingArguments


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "esm", "max_position_embeddings": 102, "pad_token_id": 1}, 100),
        ({"model_type": "esm", "position_embedding_type": "rotary", "max_position_embeddings": 102}, None),
        ({"model_type": "t5", "relative_attention_num_buckets": 32}, None),
    ],
)
def test_learned_positions_limit_the_tokens_and_rotary_or_relative_ones_do_not(config, limit):
    assert limit_of_positions(config) == limit


def test_a_plot_that_cannot_be_drawn_is_said_in_the_log_and_the_run_goes_on(caplog):
    with caplog.at_level(logging.WARNING, "hf_ext.tasks.running"), plots_if_possible():
        raise DataError("one logged step")
    assert [record.getMessage() for record in caplog.records] == ["Not plotted: one logged step"]


def test_a_command_tells_training_arguments_which_fields_the_user_set(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--head_sizes", "8"]
    defaults = {"learning_rate": 0.5, "report_to": "none"}
    parser, (model_args, args) = parse_command((AffinityArguments, FastTrainingArguments), defaults, None, words)
    assert parser.explicit == {"output_dir", "use_cpu", "head_sizes"}
    assert (model_args.head_sizes, args.learning_rate) == ([8], 0.5)
    assert args.explicit_fields == parser.explicit
