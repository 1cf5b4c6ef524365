"""What pages say of a generator's run and of an operator's, each beside what it has to beat."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from antibody_examples import antibodies, heavy, light, random_antigens
from huggingface_hub import ModelCard
from memorising_generator import save_generator
from report_runs import (
    OPERATOR_VERDICT,
    affinity_results,
    make_score,
    operator_results,
    read_pages,
    section,
    table_rows,
    write_run,
)
from tiny_generators import make_generator

from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.judging.judgement import judge_condition, judge_generated
from hf_ext.generation.rows import AntibodyRows, Sampling
from hf_ext.generation.stages import check_gates, have_passed
from hf_ext.pde.configuration import TASKS, OperatorConfig
from hf_ext.pde.model import OperatorTransformer

# --- a generator ------------------------------------------------------------------------------------------------------

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


# --- an operator ------------------------------------------------------------------------------------------------------

# What is said of proteins and their measurements, and of no equation; `residue` is not the `residual` of one.
OF_PROTEINS = re.compile(
    r"protein|antibod|antigen|amino|residue|sequence|patient|label|biology|affinity|masked|padding|leaks", re.IGNORECASE
)
LOG = [
    {"step": step, "epoch": step / 100, **{f"eval_{name}": 1 / step for name in ("loss", "nrmse", "darcy2d_nrmse")}}
    for step in (100, 200, 300)
]
PLAN = {"preset": "max_speed", "decisions": [{"name": "muon", "kind": "L", "status": "applied", "reason": "asked for"}]}


def write_operator(folder: Path, **changes: Any) -> Path:
    return write_run(folder, operator_results(**changes), num_rows=0, plan=PLAN, log=LOG)


def test_an_operator_stands_beside_trivial_predictions_and_a_dash_where_one_is_silent(tmp_path) -> None:
    report, card = read_pages(write_operator(tmp_path))
    start = report.texts.index("Operator for advection1d and darcy2d")
    assert OPERATOR_VERDICT in report.texts[start : start + 4]
    rows = table_rows(card)
    for row in (
        ["nRMSE of advection1d on test", "0.050 [0.040, 0.060]", "best baseline: 0.800, persistence"],
        ["nRMSE of darcy2d on test", "0.062 [0.060, 0.065]", "best baseline: 0.250, training mean"],
        ["training time", "1 min", "at 256 rows / s"],
        ["", "model", "training mean", "persistence"],
        ["nRMSE of darcy2d", "0.062 [0.060, 0.065]", "0.250 [0.200, 0.300]", "-"],
        ["nRMSE, overall", "0.056 [0.050, 0.062]", "0.625 [0.600, 0.650]", "-"],
    ):
        assert row in rows
    assert "A dash: the predictor has no such score." in card
    assert "Error of the best trivial prediction over the model's: advection1d 16.00x and darcy2d 4.00x." in card
    assert re.findall(r'<svg [^>]*aria-label="([^"]*)"', report.html) == [
        "loss by step: validation",
        "nrmse by step: validation, darcy2d",
    ]


def test_an_operator_that_loses_is_not_made_to_win(tmp_path) -> None:
    test = copy.deepcopy(operator_results()["test"])
    test["scores"]["model"]["darcy2d_nrmse"] = make_score(0.5, 0.4, 0.6)
    del test["scores"]["persistence"]
    verdict = {"text": "No better.", "is_better": False, "baseline": "the training mean"}
    report, card = read_pages(write_operator(tmp_path, test=test, verdict=verdict))
    assert '<p class="verdict worse">' in report.html
    assert "- It is not better than the training mean: prefer that to its" in section(card, "Limits")
    assert "A dash" not in report.text + card


def test_the_data_of_an_operator_are_said_to_be_generated_and_its_limits_follow(tmp_path) -> None:
    data = {**operator_results()["data"], "resolution": 64}
    folder = write_operator(tmp_path / "run", data=data)
    _, card = read_pages(folder)
    rows = table_rows(section(card, "Data"))
    for row in (["source", "generated"], ["resolution", "64"], ["seed", "0"], ["train", "512"], ["test", "128"]):
        assert row in rows
    assert ["`darcy2d`", "Darcy flow through cells of permeability 3 and 12"] in rows
    limits = section(card, "Limits").strip().splitlines()
    assert len(limits) == 4
    assert "- It was trained at resolution 64 and reads no other: another grid takes a new training." in limits
    assert limits[-1].endswith("no other equation, and no claim about a real flow.")
    metadata = ModelCard.load(folder / "README.md").data
    assert metadata.tags == ["hf_ext", "pde", "neural-operator"]
    result = {result.metric_type: result for result in metadata.eval_results}["darcy2d_nrmse"]
    assert (result.metric_name, result.metric_value) == ("nRMSE of darcy2d", 0.0625)
    assert (result.dataset_type, result.dataset_name) == ("generated", "Generated advection1d and darcy2d")


def test_no_page_of_an_operator_speaks_of_proteins(tmp_path) -> None:
    report, card = read_pages(write_operator(tmp_path / "operator"))
    assert OF_PROTEINS.findall(report.text + card) == []
    other, card = read_pages(write_run(tmp_path / "other", affinity_results(), num_rows=0))  # the words are there
    found = {word.lower() for word in OF_PROTEINS.findall(other.text + card)}
    assert {"amino", "residue", "sequence", "patient", "label"} <= found
    report, card = read_pages(write_run(tmp_path / "empty", {"task": "pde_operator"}, num_rows=0, plan=None, log=[]))
    assert "Operator for partial differential equations" in report.texts
    assert OF_PROTEINS.findall(report.text + card) == []


@pytest.mark.parametrize("tasks", [["darcy2d", "advection1d"], ["darcy2d"]])
def test_the_code_of_an_operators_card_runs(tmp_path, tasks, monkeypatch, capsys) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "resolution": 16}
    OperatorTransformer(OperatorConfig(tasks=tasks, **shape)).save_pretrained(tmp_path / "USER" / "NAME")
    monkeypatch.chdir(tmp_path)
    recorded = operator_results()["data"]["tasks"]
    data = {**operator_results()["data"], "resolution": 16, "tasks": {name: recorded[name] for name in tasks}}
    _, card = read_pages(write_operator(tmp_path / "USER" / "NAME", data=data))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(code.replace(".logits)", ".logits.shape)"), "card", "exec"), {})
    assert capsys.readouterr().out.strip() == f"torch.Size([1, {len(tasks)}, 256])"
    assert f"logits (B, {len(tasks)}, 256)" in card
    assert len(TASKS["darcy2d"].query_grid(16)) == 256  # as the card says of it
