"""The pages of an operator's run: errors beside trivial predictions, what was generated, how little that claims."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from page_checks import Page
from report_runs import OPERATOR_VERDICT, affinity_results, log_history, make_score, operator_results, write_run

from hf_ext.pde.configuration import OperatorConfig
from hf_ext.pde.model import OperatorTransformer
from hf_ext.pde.tasks import TASKS
from hf_ext.reporting.card import write_card
from hf_ext.reporting.report import write_report

# What is said of proteins and their measurements, and of no equation; `residue` is not the `residual` of one.
OF_PROTEINS = re.compile(
    r"protein|antibod|antigen|amino|residue|sequence|patient|label|biology|affinity|masked|padding|leaks", re.IGNORECASE
)
LOG = [
    {"step": step, "epoch": step / 100, **{f"eval_{name}": 1 / step for name in ("loss", "nrmse", "darcy2d_nrmse")}}
    for step in (100, 200, 300)
]
PLAN = {"preset": "max_speed", "decisions": [{"name": "muon", "kind": "L", "status": "applied", "reason": "asked for"}]}


def write(folder: Path, log: list | None = None, **changes: Any) -> Path:
    return write_run(folder, operator_results(**changes), num_rows=0, plan=PLAN, log=log or LOG)


def report_of(folder: Path) -> str:
    return write_report(folder)[1].read_text()


def card_of(folder: Path, **options: Any) -> str:
    return write_card(folder, **options).read_text()


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_rows(text: str) -> list[list[str]]:
    """Rows of all tables, as cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


# The report


def test_the_report_begins_with_the_equations_and_the_verdict(tmp_path: Path) -> None:
    lines = [line for line in report_of(write(tmp_path)).splitlines() if line]
    assert lines[:2] == ["# Operator for advection1d and darcy2d", f"**{OPERATOR_VERDICT}**"]


def test_key_numbers_stand_beside_the_trivial_prediction_with_the_least_error(tmp_path: Path) -> None:
    rows = table_rows(report_of(write(tmp_path)))
    note = "best trivial prediction: 0.800, persistence, 16.00x the model's"
    assert ["nRMSE of advection1d on test", "0.050 [0.040, 0.060]", note] in rows
    note = "best trivial prediction: 0.250, training mean, 4.00x the model's"
    assert ["nRMSE of darcy2d on test", "0.062 [0.060, 0.065]", note] in rows
    assert ["training time", "1 min", "at 256 rows / s"] in rows
    assert ["throughput", "256 rows / s"] in rows


def test_a_model_that_loses_is_not_made_to_win(tmp_path: Path) -> None:
    test = copy.deepcopy(operator_results()["test"])
    test["scores"]["model"]["darcy2d_nrmse"] = make_score(0.5, 0.4, 0.6)
    test["factors"]["darcy2d"] = 0.5
    verdict = {"text": "No better.", "is_better": False, "baseline": "the training mean"}
    folder = write(tmp_path, test=test, verdict=verdict)
    assert "best trivial prediction: 0.250, training mean, 0.50x the model's" in report_of(folder)
    assert '<p class="verdict worse">' in (folder / "report.html").read_text()
    assert "- It is not better than the training mean: prefer that to its" in section(card_of(folder), "Limitations")


def test_every_prediction_has_a_column_and_a_dash_where_it_is_silent(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for text, title in ((section(report_of(folder), "Result"), "nRMSE"), (card_of(folder), "nRMSE, mean over tasks")):
        rows = table_rows(text)
        assert ["", "model", "training mean", "persistence"] in rows
        silent = ["nRMSE of darcy2d", "0.062 [0.060, 0.065]", "0.250 [0.200, 0.300]", "-"]
        assert silent in rows
        assert [title, "0.056 [0.050, 0.062]", "0.625 [0.600, 0.650]", "-"] in rows
        assert "A dash: the prediction says nothing of that equation." in text
        assert "Error of the best trivial prediction over the model's: advection1d 16.00x and darcy2d 4.00x." in text
        assert "not measured" not in text.split("## How to load")[0]


def test_nobody_reads_of_a_dash_where_no_prediction_is_silent(tmp_path: Path) -> None:
    test = copy.deepcopy(operator_results()["test"])
    del test["scores"]["persistence"]
    folder = write(tmp_path, test=test, validation=None)
    assert "A dash" not in report_of(folder) + card_of(folder)


def test_validation_is_there_and_apart_from_the_test(tmp_path: Path) -> None:
    result = section(report_of(write(tmp_path)), "Result")
    assert result.index("Rows of test: 128.") < result.index("<summary>Scores on the validation split</summary>")
    assert result.index("</summary>") < result.index("Rows of validation: 127.")
    assert "Scores on the test split, 128 rows, with 95 % bootstrap intervals over rows." in card_of(tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {},
            "It began with random weights. Beside the data, its loss had inverse losses (weight 0.1) in one of 4 steps "
            "and physics priors (weight 0.05) in every step.",
        ),
        ({"inverse_loss_every": 0, "physics_weight": 0.0}, "It began with random weights.\n"),
        ({"physics_every": 0}, "its loss had inverse losses (weight 0.1) in one of 4 steps.\n"),
        ({"model_name_or_path": "/home/somebody/runs/old"}, "It began as .../old, not pinned. Beside the data"),
    ],
)
def test_training_says_how_it_began_and_what_its_loss_had(tmp_path: Path, settings: dict, sentence: str) -> None:
    settings = {**operator_results()["settings"], **settings}
    assert sentence in section(report_of(write(tmp_path, settings=settings)), "Training")


def test_the_data_are_said_to_be_generated_and_how(tmp_path: Path) -> None:
    folder = write(tmp_path)
    rows = table_rows(section(report_of(folder), "Data"))
    for row in (["source", "generated"], ["resolution", "32"], ["seed", "0"], ["train", "512"], ["test", "128"]):
        assert row in rows
    assert ["`darcy2d`", "Darcy flow through cells of permeability 3 and 12"] in rows
    card = card_of(folder)
    assert "Generated for this run at resolution 32, seed 0: nothing was measured." in section(card, "Data")
    assert "Samples of each equation: train 512, validation 128, test 128." in section(card, "Data")


def test_curves_are_of_the_loss_and_of_the_error_that_chose_the_model(tmp_path: Path) -> None:
    html = write_report(write(tmp_path))[0].read_text()
    assert re.findall(r'<svg [^>]*aria-label="([^"]*)"', html) == [
        "loss by step: validation",
        "nrmse by step: darcy2d, validation, validation",
    ]
    assert Page(html).problems == []


# Both


def test_no_page_speaks_of_proteins(tmp_path: Path) -> None:
    folder = write(tmp_path / "operator")
    text = report_of(folder) + card_of(folder) + " ".join(Page((folder / "report.html").read_text()).texts)
    assert OF_PROTEINS.findall(text) == []
    other = write_run(tmp_path / "other", affinity_results(), num_rows=0)  # the words that are looked for are there
    found = {word.lower() for word in OF_PROTEINS.findall(report_of(other) + card_of(other))}
    assert {"protein", "residue", "sequence", "patient", "label", "biology", "padding"} <= found


def test_an_empty_record_says_what_is_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"task": "pde_operator"}, num_rows=0, plan=None, log=log_history()[:1])
    report, card = report_of(folder), card_of(folder)
    assert report.startswith("# Operator for partial differential equations\n")
    assert ["nRMSE on test", "not measured", "no test split was scored"] in table_rows(report)
    assert "Not measured: the run has no scores of a test split." in report
    assert "Not recorded: the run has no data report." in report
    assert "This run left no scores." in card
    assert "solutions of equations that were not recorded on a grid" in card
    assert OF_PROTEINS.findall(report + card) == []


def test_markup_in_a_record_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> [x](http://evil)\n# b"
    data = {**operator_results()["data"], "tasks": {"advection1d": hostile, hostile: "x"}, "source": hostile}
    folder = write(tmp_path, data=data)
    page = Page(write_report(folder)[0].read_text())
    assert (page.problems, "script" in page.tags) == ([], False)
    body = card_of(folder).split("---\n")[2]
    outside_code = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", body, flags=re.DOTALL)
    assert "<script" not in outside_code
    assert "](http" not in outside_code


# The card


def test_the_metadata_are_of_an_operator(tmp_path: Path) -> None:
    write_card(write(tmp_path / "run"))
    card = ModelCard.load(tmp_path / "run" / "README.md")
    data = card.data.to_dict()
    assert data["tags"] == ["hf_ext", "pde", "neural-operator"]
    assert (data["library_name"], data["license"]) == ("hf_ext", "unknown")
    assert not {"pipeline_tag", "base_model", "datasets"} & set(data)
    results = {result.metric_type: result for result in card.data.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        **{"advection1d_nrmse": 0.05, "darcy2d_nrmse": 0.0625, "nrmse": 0.05625}
    }
    first = results["darcy2d_nrmse"]
    assert (first.metric_name, first.task_name) == ("nRMSE of darcy2d", "Solutions of partial differential equations")
    assert (first.dataset_type, first.dataset_name) == ("generated", "Generated advection1d and darcy2d")
    assert first.dataset_split == "test"


def test_a_base_on_the_hub_is_named_with_what_it_reads(tmp_path: Path) -> None:
    settings = {**operator_results()["settings"], "model_name_or_path": "owner/operator"}
    card = card_of(write(tmp_path, settings=settings))
    assert "base_model:\n- owner/operator" in card
    assert "base_model_relation: finetune" in card
    row = ["advection1d, darcy2d", "[owner/operator](https://huggingface.co/owner/operator)", "full"]
    assert row in [cells[:3] for cells in table_rows(card)]
    licence = section(card, "Licence and citation")
    assert "The licences of the pretrained models above hold as well." in licence  # generated data have none


def test_limitations_are_those_of_generated_data_on_one_grid(tmp_path: Path) -> None:
    data = {**operator_results()["data"], "resolution": 64}
    limits = section(card_of(write(tmp_path, data=data)), "Limitations")
    assert [line[:60] for line in limits.strip().splitlines()] == [
        "- Trained and scored on generated samples of one distribution"[:60],
        "- It was trained at resolution 64 and reads no other: another"[:60],
        "- Its scores are means over samples, and one solution may be "[:60],
        "- This is about `advection1d` and `darcy2d` as they were gene"[:60],
    ]
    assert limits.strip().endswith("no other equation, and no claim about a real flow.")


def test_inputs_of_the_code_have_the_grid_of_the_run(tmp_path: Path) -> None:
    data = {**operator_results()["data"], "resolution": 64}
    text = card_of(write(tmp_path, data=data), repo_id="me/operator")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(code, "card", "exec")
    assert 'OperatorTransformer.from_pretrained("me/operator")' in code
    assert '"advection1d_inputs": torch.rand(1, 1024)' in code
    assert '"darcy2d_inputs": torch.full((1, 64, 64), 3.0)' in code
    assert "`logits` (B, 2, 4,096) are the solutions of `advection1d` and `darcy2d`, in this order" in text


@pytest.mark.parametrize("tasks", [["darcy2d", "advection1d"], ["darcy2d"]])
def test_the_code_of_the_card_runs(tmp_path: Path, tasks: list[str], monkeypatch, capsys) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "resolution": 16}
    operator = OperatorTransformer(OperatorConfig(tasks=tasks, **shape))
    operator.save_pretrained(tmp_path / "USER" / "NAME")
    monkeypatch.chdir(tmp_path)
    recorded = operator_results()["data"]["tasks"]
    data = {**operator_results()["data"], "resolution": 16, "tasks": {name: recorded[name] for name in tasks}}
    text = card_of(write(tmp_path / "USER" / "NAME", data=data))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code.replace(".logits)", ".logits.shape)"), "card", "exec"), {})
    assert capsys.readouterr().out.strip() == f"torch.Size([1, {len(tasks)}, 256])"
    assert f"`logits` (B, {len(tasks)}, 256)" in text
    assert len(TASKS["darcy2d"].query_grid(16)) == 256  # as the card says of it
