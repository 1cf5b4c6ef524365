import pytest

from hf_ext.errors import ArgumentError
from hf_ext.models.configuration import AffinityConfig, EncoderSpec, TowerSpec, build_config

ENCODER = EncoderSpec("folder", {"model_type": "esm", "hidden_size": 8})


def towers(*inputs, pooling="mean"):
    return [TowerSpec(0, columns, pooling) for columns in inputs]


@pytest.mark.parametrize(
    ("specs", "settings", "message"),
    [
        ([], {}, "0 towers: an affinity model has one to 3"),
        (towers(*[[[name]] for name in "abcd"]), {}, "4 towers: an affinity model has one to 3"),
        (towers([["a"]], [["a"]]), {}, "repeat a column"),
        (towers([["a"]], [["a", "b"]]), {}, "['a', 'a+b'] repeat a column"),
        (towers([["a", "a"]]), {}, "repeat a column"),
        (towers([["a", "b", "c"]]), {}, "an input is one column or a pair such as heavy+light"),
        (towers([[]]), {}, "an input is one column or a pair such as heavy+light"),
        (towers([["a"]], pooling="median"), {}, "pooling='median': allowed are mean, mean_tokens, cls, max"),
        (towers([["a"]]), {"loss": "mae"}, "loss='mae': allowed are mse, huber, tobit, ranking"),
    ],
)
def test_what_no_model_could_be_built_from_is_refused(specs, settings, message):
    with pytest.raises(ArgumentError) as error:
        build_config([ENCODER], specs, **settings)
    assert message in str(error.value)


def test_a_tower_that_does_not_say_its_pooling_has_the_mean_over_residues():
    config = AffinityConfig(encoders=[vars(ENCODER)], towers=[{"encoder": 0, "inputs": [["a"]]}])
    assert config.tower_specs == towers([["a"]], pooling="mean")


def test_a_configuration_reads_back_equal(tmp_path):
    lora = EncoderSpec("other", {"model_type": "t5", "d_model": 4}, "main", "sha256:1", "lora", {"r": 2})
    config = build_config(
        [ENCODER, lora], [TowerSpec(1, [["a", "b"]], "cls"), TowerSpec(0, [["c"], ["d"]])], head_sizes=[], loss="tobit"
    )
    config.save_pretrained(tmp_path)
    again = AffinityConfig.from_pretrained(tmp_path)
    assert again.encoder_specs == [ENCODER, lora]
    assert again.tower_specs == [TowerSpec(1, [["a", "b"]], "cls"), TowerSpec(0, [["c"], ["d"]])]
    assert again.input_columns == {"a+b": ["a", "b"], "c": ["c"], "d": ["d"]}
    assert (again.head_sizes, again.loss) == ([], "tobit")


def test_defaults_are_those_of_the_command_line():
    config = build_config([ENCODER], towers([["a"]]))
    assert config.head_sizes == [1024, 512, 256, 128]
    assert (config.head_dropout, config.loss, config.label_mean, config.label_std) == (0.3, "mse", 0.0, 1.0)
