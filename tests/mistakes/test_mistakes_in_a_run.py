"""What is found before training stands where people look afterwards: in the log, in the report, in the verdict."""

import importlib
import json

import pytest
from mistakes import BASE, NUM_ROWS, Case

SPLIT = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
SEQUENCES = BASE["sequence"]
# Rows 52 to 54 of the file, the first of test, repeat rows 2, 3 and 4.
LEAKED = [*SEQUENCES[:50], *SEQUENCES[:3], *SEQUENCES[53:]]


def run(folder, encoder, words="", **columns):
    """Trains for two epochs; results, log and report."""
    case = Case(columns={"split": SPLIT, **columns}, words=words)
    quick = "--split_column split --num_train_epochs 2 --head_sizes 4 --disable_tqdm true"
    command = [*case.command(folder, encoder), *quick.split(), "--embedding_cache_dir", str(folder / "cache")]
    importlib.import_module("max_speed").main(command)
    out = folder / "out"
    results = json.loads((out / "all_results.json").read_text())
    return results, (out / "run.log").read_text(), (out / "README.md").read_text()


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory, demo_encoders):
    bounded = [f"<={label}" if label < 6 else str(label) for label in BASE["pKd"]]
    folder = tmp_path_factory.mktemp("mistaken")
    return run(folder, demo_encoders[1], "--binder_threshold 20", sequence=LEAKED, pKd=bounded)


@pytest.fixture(scope="module")
def innocent(tmp_path_factory, demo_encoders):
    return run(tmp_path_factory.mktemp("innocent"), demo_encoders[1])


@pytest.mark.nightly
def test_the_verdict_names_test_rows_that_stand_in_train(mistaken, innocent):
    text = (
        "But 3 of 10 test rows (30.0%) stand in train, too: test row 52 is train row 2, test row 53 is train row 3, "
        "test row 54 is train row 4. On these, any score is memory."
    )
    assert mistaken[0]["verdict"]["text"].endswith(text)
    assert "stand in train" not in innocent[0]["verdict"]["text"]


@pytest.mark.parametrize("words", ["training labels are bounds, which --loss mse takes", "--binder_threshold 20: all"])
def test_log_and_report_say_what_is_probably_a_mistake(mistaken, innocent, words):
    for place in (1, 2):
        assert words.replace("--", "") in mistaken[place].replace("\\", "").replace("--", "")
        assert words.replace("--", "") not in innocent[place].replace("\\", "").replace("--", "")
    assert any(words in text for text in mistaken[0]["data"]["warnings"])
    assert innocent[0]["data"]["warnings"] == []


def test_repeated_rows_of_unlike_labels_are_in_the_report(mistaken, innocent):
    # Three sequences twice, of which those with a bound do not count.
    assert 1 <= mistaken[0]["data"]["repeats"]["num_disagreeing"] <= 3
    assert "labels that disagree" in mistaken[1]
    assert "labels that disagree" in mistaken[2]
    assert "labels that disagree" not in innocent[2]
    assert innocent[0]["data"]["repeats"] == {
        "num_all": NUM_ROWS,
        "num_rows": 0,
        "num_groups": 0,
        "num_disagreeing": 0,
    }
