"""Words of the command line that cannot be meant."""

from pathlib import Path

import pytest
from mistakes import BASE, Case, Mistake, check_mistake, check_twin, parametrized

from hf_ext.errors import ArgumentError
from hf_ext.pretrained import check_folder

THREE = dict.fromkeys(("heavy", "light", "antigen"), BASE["sequence"])


def words(text: str, **columns) -> Case:
    return Case(columns=columns, words=text)


MISTAKES = [
    Mistake(
        "a head of no units",  # was: "must be from 1 to 65536"
        words("--head_sizes 0"),
        ("--head_sizes 0", "lets nothing through", "head_sizes: [] in the YAML"),
        words("--head_sizes 8"),
        before="misleading",
    ),
    Mistake("a mistyped flag", words("--learning_rat 0.1"), ("--learning_rat", "did you mean '--learning_rate'")),
    Mistake("a flag of another program", words("--batch 8"), ("--batch",)),
    Mistake("a rate below 0", words("--learning_rate -1"), ("learning_rate=-1.0", "not negative")),
    Mistake("a rate that is no number", words("--learning_rate fast"), ("fast",)),
    Mistake("no epochs", words("--num_train_epochs 0"), ("num_train_epochs",)),
    Mistake("a whole dropout", words("--head_dropout 1"), ("head_dropout", "below 1"), words("--head_dropout 0.5")),
    Mistake("an unknown loss", words("--loss l1"), ("loss", "mse")),
    Mistake("an unknown metric", words("--metric_for_best_model spearmann"), ("spearmann", "spearman")),
    Mistake("a threshold that is no number", words("--binder_threshold nan"), ("binder_threshold", "finite")),
    Mistake("adapters on frozen towers", words("--use_peft true --tower_training frozen"), ("contradict each other",)),
    Mistake(
        "two encoders for three columns",
        words("--sequence_columns heavy light antigen --encoders {encoder} {encoder}", **THREE),
        ("2 encoders for 3 sequence columns", "--tower_inputs heavy light,antigen"),
        words(
            "--sequence_columns heavy light antigen --encoders {encoder} {encoder} --tower_inputs heavy+light antigen",
            **THREE,
        ),
    ),
    Mistake(
        "a column that no tower reads",
        words("--sequence_columns heavy light --tower_inputs heavy", **THREE),
        ("Towers read ['heavy']", "each exactly once"),
        words("--sequence_columns heavy light --tower_inputs heavy,light", **THREE),
    ),
    Mistake("a pooling that is none", words("--pooling median"), ("median", "mean")),
    Mistake(
        "an encoder folder that is not there",  # was: the Hub's error about repository ids
        words("--encoders {folder}/esm2"),
        ("Encoder '{folder}/esm2': there is no such folder", "Nearest names there: esm_2"),
        before="misleading",
    ),
    Mistake(
        "an encoder's file",
        words("--encoders {encoder}/config.json"),
        ("is a file: give its folder",),
        before="misleading",
    ),
    Mistake("a cluster option without clusters", words("--cluster_identity 0.9"), ("only acts with --split cluster",)),
]


@parametrized(MISTAKES)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    (tmp_path / "esm_2").mkdir()
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(16)
@parametrized(MISTAKES)
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./encoders/esm3", "encoders holds no 'esm3'. Nearest names there: esm2."),
        ("encoders/esm2/more/x", "encoders/esm2 holds no 'more'. Folders there: none."),
        ("../nowhere/esm2", "holds no 'nowhere'"),
        ("~/nowhere/esm2", "holds no 'nowhere'"),
        ("esm2/", "Nearest names there: "),
        ("encoders\\esm2", "there is no such folder"),
        ("encoders/esm2/config.json", "give its folder, 'encoders/esm2'"),
    ],
)
def test_what_can_only_be_a_path_is_no_hub_id(name, words, tmp_path, monkeypatch):
    (tmp_path / "encoders" / "esm2").mkdir(parents=True)
    (tmp_path / "encoders" / "esm2" / "config.json").write_text("{{}}")
    (tmp_path / "esm1").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as error:
        check_folder(name, "Encoder")
    assert words in str(error.value)


def test_what_may_be_a_hub_id_is_left_to_the_hub(tmp_path, monkeypatch):
    (tmp_path / "encoders" / "esm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("facebook/esm2_t6_8M_UR50D", "esm2", "encoders/esm2", str(Path("encoders").absolute())):
        assert check_folder(name, "Encoder") == ""
    assert check_folder("encoders/esm3", "Encoder").endswith("holds no 'esm3'. Nearest names there: esm2.")
