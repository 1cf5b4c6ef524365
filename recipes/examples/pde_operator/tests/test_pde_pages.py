"""What report and card say of an operator: scores beside trivial ones, limits, and no word of proteins."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from pde_operator.configuration import TASKS, OperatorConfig
from pde_operator.model import OperatorTransformer
from pde_operator.task import OperatorTask
from report_runs import affinity_results, make_score, read_pages, section, table_rows, write_run

from hf_ext.reporting import page_record

VERDICT = "Better than the persistence and the training mean: nRMSE 0.056 against 0.525, 128 rows."
# What is said of proteins and their measurements, and of no equation; `residue` is not the `residual` of one.
OF_PROTEINS = re.compile(
    r"protein|antibod|antigen|amino|residue|sequence|patient|label|biology|affinity|masked|padding|leaks", re.IGNORECASE
)
LOG = [
    {"step": step, "epoch": step / 100, **{f"eval_{name}": 1 / step for name in ("loss", "nrmse", "darcy2d_nrmse")}}
    for step in (100, 200, 300)
]
PLAN = {"preset": "max_speed", "decisions": [{"name": "muon", "kind": "L", "status": "applied", "reason": "asked for"}]}


def operator_results(**changes: Any) -> dict[str, Any]:
    """A record of an operator for two equations, as a run leaves it, with its page."""
    scores = {
        "model": {
            "advection1d_nrmse": make_score(0.05, 0.04, 0.06),
            "darcy2d_nrmse": make_score(0.0625, 0.06, 0.065),
            "nrmse": make_score(0.05625, 0.05, 0.0625),
        },
        "training mean": {
            "advection1d_nrmse": make_score(1.0, 0.9, 1.1),
            "darcy2d_nrmse": make_score(0.25, 0.2, 0.3),
            "nrmse": make_score(0.625, 0.6, 0.65),
        },
        "persistence": {"advection1d_nrmse": make_score(0.8, 0.7, 0.9)},
    }
    split = {
        "num_rows": 128,
        "scores": scores,
        "baselines": {"training mean": {}, "persistence": {}},
        "factors": {"advection1d": 16.0, "darcy2d": 4.0},
        "verdict": {"text": VERDICT, "is_better": True, "baseline": "the persistence and the training mean"},
    }
    results = {
        "format": 1,
        "created": "2026-11-23T14:30:00+00:00",
        "command": "python recipes/examples/pde_operator/train.py --output_dir /home/somebody/runs/pde",
        "seed": 42,
        "model": {"class": "OperatorTransformer", "num_parameters": 600_000, "num_trainable": 600_000},
        "train": {"train_runtime": 60.0, "train_loss": 0.4, "epoch": 30.0, "train_sequences_per_s": 256.0},
        "best": {"step": 900, "nrmse": 0.06},
        "settings": {
            **{"tasks": ["advection1d", "darcy2d"], "resolution": 32, "model_name_or_path": None},
            **{"inverse_loss_every": 4, "inverse_loss_weight": 0.1, "physics_every": 1, "physics_weight": 0.05},
        },
        "settings_from": {"resolution": "command line"},
        "costs": {"wall_s": 100.0, "train_s": 60.0, "peak_memory_gib": 1.25, "memory_of": "process"},
        "task": "pde_operator",
        "data": {
            "source": "generated",
            "sizes": {"train": 512, "validation": 128, "test": 128},
            "tasks": {
                "advection1d": "advection of sines at speed 0.4 along a circle",
                "darcy2d": "Darcy flow through cells of permeability 3 and 12",
            },
            "resolution": 32,
            "seed": 0,
        },
        "verdict": split["verdict"],
        "test": split,
    }
    results = {**results, **changes}
    return {**results, "page": page_record(OperatorTask().describe(results))}


def write_operator(folder: Path, **changes: Any) -> Path:
    return write_run(folder, operator_results(**changes), num_rows=0, plan=PLAN, log=LOG)


def test_an_operator_stands_beside_trivial_predictions_and_a_dash_where_one_is_silent(tmp_path) -> None:
    report, card = read_pages(write_operator(tmp_path))
    start = report.texts.index("Operator for advection1d and darcy2d")
    assert report.problems == []
    assert VERDICT in report.texts[start : start + 4]
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
    empty = {"task": "pde_operator", "page": page_record(OperatorTask().describe({}))}
    report, card = read_pages(write_run(tmp_path / "empty", empty, num_rows=0, plan=None, log=[]))
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


def test_names_of_equations_add_no_markup(tmp_path) -> None:
    markdown_it = pytest.importorskip("markdown_it")
    hostile = "<script>alert(1)</script> [x](http://evil)\n# b"
    data = {**operator_results()["data"], "tasks": {"advection1d": hostile, hostile: "x"}, "source": hostile}
    report, card = read_pages(write_operator(tmp_path, data=data))
    rendered = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(card)
    assert (report.problems, "script" in report.tags, "<script" in rendered) == ([], False, False)
    assert re.findall(r'href="([^"]*)"', rendered) == ["report.html"]
