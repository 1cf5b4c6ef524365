"""What pages say of a generator's run, beside what it has to beat."""

from pathlib import Path

import pytest
from antibody_examples import antibodies, heavy, light, random_antigens
from huggingface_hub import ModelCard
from inside import (
    AntibodyRows,
    GeneratorArguments,
    Sampling,
    check_gates,
    have_passed,
    judge_condition,
    judge_generated,
)
from memorising_generator import save_generator
from report_runs import read_pages, section, table_rows, write_run
from tiny_generators import make_generator

from hf_ext.evaluation import ResamplingGroups

ANTIGENS = random_antigens(12, seed=1)
NEW = "ARDDDEEEFFFY"  # of an output that stands in no training row
EVALUATIONS = [{"step": 5 * i, "epoch": i, "eval_token_loss": 2.0 - 0.1 * i, "sampled_valid": 0.1 * i} for i in (1, 2)]


@pytest.fixture(scope="module")
def judged():
    """Outputs, one of them a training antibody, and what is said about them; the antigen is not read."""
    training = antibodies(8, random_antigens(4, seed=2), seed=3)
    chains = [training.heavy[0], *(heavy(NEW[:-1] + letter) for letter in "ADEFHKLMNPQ")]
    rows = AntibodyRows.of_columns(chains, [light()] * 12, ANTIGENS)
    sampling = Sampling(ResamplingGroups.of("antigen", ANTIGENS), num_resamples=50)
    losses = [1.0, 1.1] * 6
    effect = judge_condition("antigen", [100] * 12, losses, losses, sampling)
    return rows, judge_generated(rows, training, antibodies(12, ANTIGENS, seed=4), sampling, effects=[effect])[0]


def write_generator(judged, folder: Path, token_loss: float = 0.5) -> Path:
    """As a run leaves it, with a tiny model."""
    _, found = judged
    save_generator(make_generator(), folder)
    gates = check_gates(1, {"token_loss": token_loss, "reproduced": 1.0, "valid": 1.0})
    measured = {"train_token_loss": token_loss, "reproduced": {"share": 1.0}}
    results = {
        **{"format": 1, "task": "generation", "stage": 1, "verdict": found["verdict"]},
        **{"gates": gates, "gates_passed": have_passed(gates)},
        "model": {"class": "AntibodyGenerator", "architecture": "lstm", "num_parameters": 9, "num_trainable": 9},
        "generation": {**found, **measured},
        "data": {"source": "/home/somebody/pairs.csv", "sizes": {"train": 8, "test": 12}, "rows_read": 20},
        "settings": {**vars(GeneratorArguments(heavy_column="vh", light_column="vl")), "output_dir": "x"},
    }
    return write_run(folder, results, num_rows=0, log=EVALUATIONS)


def test_a_generator_is_told_by_its_verdict_and_the_gates_that_failed(judged, tmp_path) -> None:
    report, card = read_pages(write_generator(judged, tmp_path / "run"))
    assert "Generating antibodies for antigen" in report.texts
    assert "gnores the antigen" in card.split("\n\n")[1]
    assert "Gate token_loss of stage 1: 0.500; at most 0.100 is needed" in report.text.split("valid antibodies")[0]
    assert "**Alarm:** Gate token\\_loss of stage 1" in card or "**Alarm:** Gate token_loss of stage 1" in card
    for text in (report.text, card):
        assert "by patterns, not by numbering" in text
        assert "Stage 1 did not pass its gates." in text
    report, card = read_pages(write_generator(judged, tmp_path / "passed", token_loss=0.05))
    assert "Alarm" not in card
    assert "Stage 1 passed its gates." in report.text


def test_every_baseline_stands_beside_the_generator_with_intervals(judged, tmp_path) -> None:
    report, card = read_pages(write_generator(judged, tmp_path))
    rows = table_rows(section(card, "Result"))
    assert ["", *judged[1]["sets"]] in rows
    (row,) = [row for row in rows if row[0] == "Training antibodies to the residue"]
    assert row[1].startswith("0.083 [")  # one of twelve
    assert "The model ignores the antigen: shuffling it costs" in card
    assert "sampled valid" in report.text
    assert "Ignores the antigen" in section(card, "Limits")


def test_no_sequence_of_outputs_or_data_stands_on_a_page(judged, tmp_path) -> None:
    rows, _ = judged
    report, card = read_pages(write_generator(judged, tmp_path))
    secrets = (*rows.heavy, *ANTIGENS, "/home/somebody")
    assert not [text for text in (report.html, card) for secret in secrets if secret in text]


def test_the_card_says_what_a_generator_must_not_be_used_for_and_its_code_samples(judged, tmp_path, capsys) -> None:
    folder = write_generator(judged, tmp_path)
    _, card = read_pages(folder)
    use = section(card, "What it must not be used for")
    for words in ("No therapeutic", "Not validated in a laboratory", "may reproduce training antibodies", "0.083 ["):
        assert words in use
    assert "antibody-generation" in ModelCard.load(folder / "README.md").data.tags
    assert "hf-ext sample --model USER/NAME" in card
    code = card.split("```python\n")[1].split("```")[0].replace("USER/NAME", str(folder))
    exec(compile(code.replace("num_samples=5", "num_samples=2, max_new_tokens=5"), "card", "exec"), {})
    assert len(capsys.readouterr().out.strip().splitlines()) == 2
