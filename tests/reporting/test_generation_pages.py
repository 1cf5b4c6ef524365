"""The pages of a generator's run: verdict, baselines beside the model, gates, and what it must not be used for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from antibody_examples import antibodies, heavy, light, random_antigens
from memorising_generator import save_generator
from tiny_generators import make_generator

from hf_ext.errors import DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.conditions import judge_condition
from hf_ext.generation.judging.gates import check_gates, have_passed
from hf_ext.generation.judging.judgement import judge_generated
from hf_ext.generation.judging.rows import AntibodyRows, Sampling
from hf_ext.generation.results import write_generated
from hf_ext.reporting.card import write_card
from hf_ext.reporting.report import write_report

ANTIGENS = random_antigens(12, seed=1)
NEW = "ARDDDEEEFFFY"  # of an output that stands in no training row
EVALUATIONS = [{"step": 5 * i, "epoch": i, "eval_token_loss": 2.0 - 0.1 * i, "sampled_valid": 0.1 * i} for i in (1, 2)]


@pytest.fixture(scope="module")
def judged():
    """Outputs, one of them a training antibody, and what is said about them; the antigen is not read."""
    training = antibodies(8, random_antigens(4, seed=2), seed=3)
    chains = [training.heavy[0], *(heavy(NEW[:-1] + letter) for letter in "ADEFHKLMNPQ")]
    rows = AntibodyRows.of_columns(chains, [light()] * 12, ANTIGENS)
    sampling = Sampling(ResamplingUnits.of("antigen", ANTIGENS), num_resamples=50)
    losses = [1.0, 1.1] * 6
    effect = judge_condition("antigen", [100] * 12, losses, losses, sampling)
    judgement = judge_generated(rows, training, antibodies(12, ANTIGENS, seed=4), sampling, effects=[effect])
    return rows, judgement


@pytest.fixture
def folder(judged, tmp_path):
    return write_run(judged, tmp_path / "run")


def write_run(judged, folder, token_loss=0.5, stage=1) -> Path:
    """As `hf_ext.generation.results.save_results` leaves it, with a tiny model."""
    rows, judgement = judged
    save_generator(make_generator(), folder)
    numbers = {"num_errors": 0.0, "token_loss": token_loss, "reproduced": 1.0, "valid": 1.0}
    gates = check_gates(stage, numbers)
    results = {
        "format": 1,
        "task": "generation",
        "stage": stage,
        "verdict": judgement.verdict.as_dict(),
        "gates": [gate.as_dict() for gate in gates],
        "gates_passed": have_passed(gates),
        "model": {"class": "AntibodyGenerator", "architecture": "lstm", "num_parameters": 9, "num_trainable": 9},
        "generation": {**judgement.as_dict(), "train_token_loss": token_loss, "reproduced": {"share": 1.0}},
        "data": {"source": "/home/somebody/pairs.csv", "sizes": {"train": 8, "test": 12}, "rows_read": 20},
        "settings": {"antigen_column": "antigen", "heavy_column": "vh", "light_column": "vl", "output_dir": "x"},
    }
    (folder / "all_results.json").write_text(json.dumps(results, default=str))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": EVALUATIONS, "global_step": 10}))
    write_generated(folder / "generated.csv", rows, None, judgement)
    return folder


def test_the_report_begins_with_the_verdict_and_the_gates_that_failed(folder, judged):
    _, markdown = write_report(folder)
    text = markdown.read_text()
    lines = [line for line in text.splitlines() if line]
    assert lines[0] == "# Generating antibodies for antigen"
    assert "gnores the antigen" in lines[1]
    assert lines[2].startswith("- **ALARM** Gate token_loss of stage 1: 0.500; at most 0.100 is needed")
    assert "by patterns, not by numbering" in text
    assert "Stage 1 did not pass its gates." in text


def test_a_run_that_passed_has_no_alarm(judged, tmp_path):
    _, markdown = write_report(write_run(judged, tmp_path / "run", token_loss=0.05))
    assert "ALARM" not in markdown.read_text()
    assert "Stage 1 passed its gates." in markdown.read_text()


def test_every_baseline_stands_beside_the_model_with_intervals(folder, judged):
    _, judgement = judged
    html, markdown = write_report(folder)
    text = markdown.read_text()
    headers = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert ["", *judgement.sets] in headers
    (row,) = [line for line in text.splitlines() if "| Training antibodies to the residue" in line]
    assert row.split("|")[2].strip().startswith("0.083 [")  # one of twelve
    assert "The model less each baseline" in text
    assert "The model ignores the antigen: shuffling it costs" in text
    assert "Antibodies written at each evaluation" in text
    assert "10 %" in text  # sampled_valid of the first
    assert "The model less each baseline" in html.read_text()


def test_samples_show_what_is_new_and_neither_training_antibodies_nor_antigens(folder, judged):
    rows, _ = judged
    html, markdown = write_report(folder)
    card = write_card(folder)
    texts = [path.read_text() for path in (html, markdown, card)]
    assert rows.heavy[1] in texts[0]
    assert "a training antibody, not shown" in texts[0]
    assert "1 (40 residues)" in texts[1]
    assert not [text for text in texts for secret in (rows.heavy[0], *ANTIGENS, "/home/somebody") if secret in text]


def test_the_card_says_what_the_model_must_not_be_used_for(folder):
    text = write_card(folder).read_text()
    use = text.split("## What it must not be used for")[1].split("\n## ")[0]
    for words in ("No therapeutic", "Not validated in a laboratory", "may reproduce training antibodies", "0.083 ["):
        assert words in use
    limits = text.split("## Limitations")[1].split("\n## ")[0]
    assert "Ignores the antigen" in limits
    assert "writing sequences like those of the training antibodies" in limits
    assert "antibody-generation" in text.split("---")[1]
    assert "FAILED" in text
    assert "hf-ext sample --model USER/NAME" in text


def test_the_code_of_the_card_samples_from_the_folder(folder, capsys):
    text = write_card(folder).read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("USER/NAME", str(folder))
    exec(compile(code.replace("num_samples=5", "num_samples=2, max_new_tokens=5"), "card", "exec"), {})
    assert len(capsys.readouterr().out.strip().splitlines()) == 2


def test_what_was_not_measured_is_said(folder):
    results = json.loads((folder / "all_results.json").read_text())
    (folder / "all_results.json").write_text(json.dumps({**results, "generation": {}}))
    _, markdown = write_report(folder)
    assert "Not measured: the run judged no outputs." in markdown.read_text()
    assert "How often it does was not measured" in write_card(folder).read_text()


def test_a_table_of_outputs_that_is_none_is_refused(folder):
    (folder / "generated.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"generated\.csv: lacks columns"):
        write_report(folder)
