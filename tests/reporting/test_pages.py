"""Report and card of a run: what a person who was not there reads first, and what no page may do."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_checks import Page, contrast, palettes
from report_runs import (
    COMMIT,
    VERDICT,
    affinity_results,
    make_score,
    masked_lm_results,
    read_pages,
    section,
    table_rows,
    write_predictions,
    write_run,
)

from hf_ext.errors import DataError
from hf_ext.reporting import write_report
from hf_ext.reporting.run_files import hide_folders

pytestmark = pytest.mark.internals
SECTIONS = ["result", "limits", "model", "loading", "data", "training", "plan", "cost", "reproduce", "licence"]


def changed(path: str, value: Any) -> dict[str, Any]:
    """`affinity_results` with one value changed; `path` is dotted."""
    record = copy.deepcopy(affinity_results())
    del record["test"]["scores"]["model"]["per_group_spearman"]  # a chart, which takes its time
    *parents, last = path.split(".")
    target: Any = record
    for name in parents:
        target = target[name]
    target[last] = value
    return record


def test_every_page_is_whole_loads_nothing_and_runs_nothing(tmp_path) -> None:
    test = {"num_rows": 1, "scores": {"model": {"spearman": make_score(None), "rmse": make_score(0.3)}}}
    bare = {"num_rows": 0, "log": []}
    old = {**bare, "plan": None, "has_page": False}
    cases: list[tuple[dict, dict]] = [
        (affinity_results(), {}),
        (affinity_results(test=test, ensemble=None), {"num_rows": 1, "log": []}),
        (affinity_results(test=None, verdict=None, early_stopping={"patience": 3}), bare),
        (affinity_results(data={"streaming": True, "source": "a/b"}, labels=None), bare),
        (masked_lm_results(), bare),
        *(({"task": task}, old) for task in ("affinity", "generation", "folding")),
    ]
    for number, (results, options) in enumerate(cases):
        report, card = read_pages(write_run(tmp_path / str(number), results, **options))
        assert report.problems == []
        assert report.html.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
        assert "default-src 'none'; style-src 'unsafe-inline'" in report.html
        assert {"#result", "#limits", "#data", "#training", "#plan"} <= {*report.links}
        assert "nan" not in re.findall(r"[a-z]+", report.text.lower())
        assert not re.search(r"\bNone\b|\{'|\[\]", report.text + card), number


def test_the_check_of_pages_sees_what_is_wrong() -> None:
    for html, problem in (
        ("<p><b>x</p></b>", "</p> at line 1 closes ['b']"),
        ("<section>", "<section> stays open"),
        ('<a href="#gone">x</a>', "link #gone leads nowhere"),
        ('<p id="a"></p><p id="a"></p>', "id a twice"),
        ('<img src="https://x.y/z.png">', "<img src=https://x.y/z.png> loads"),
        ('<link href="style.css">', "<link href=style.css> loads"),
        ("<script></script>", "<script>"),
        ('<p onclick="x()"></p>', "<p onclick> runs code"),
        ("<style>a { background: url(x.png) }</style>", "style loads x.png"),
    ):
        assert Page(html).problems[0] == problem


def test_both_begin_with_the_verdict_then_alarms_then_the_score_beside_the_best_baseline(tmp_path) -> None:
    report, card = read_pages(write_run(tmp_path / "first", affinity_results()))
    alarms = [
        "Test predictions: RMSE 2.1025 is no better than the 2.1001 of a constant.",
        "Training, step 100: 9 distinct values in 512 predictions.",
        "Labels of train: 36.6 % are exactly 6.",
    ]
    start = report.texts.index(VERDICT)
    assert report.texts[start - 1] == "Predicting pKd from heavy, light and antigen"
    assert report.texts[start + 1 : start + 5] == ["3 alarms", *alarms]
    assert '<p class="verdict better">' in report.html
    lines = [line for line in card.splitlines() if line]
    assert lines[:5] == ["# first", VERDICT, *(f"- **Alarm:** {alarm}" for alarm in alarms)]
    assert table_rows(card)[2:7] == [
        ["Spearman on test", "0.800 [0.750, 0.850]", "best baseline: 0.600, ridge on embeddings"],
        ["RMSE on test", "0.500 [0.450, 0.550]", "best baseline: 0.900, ridge on embeddings"],
        ["training rows", "2,400", "seen 3 times"],
        ["training time", "12 min 34 s", "at 187,770 residues / s"],
        ["peak memory", "1.25 GiB", "of the process"],
    ]
    assert [link[1:] for link in report.links] == SECTIONS


def test_predictors_stand_side_by_side_with_the_model_marked(tmp_path) -> None:
    report, card = read_pages(write_run(tmp_path, affinity_results()))
    rows = table_rows(section(card, "Result"))
    assert ["", "model", "training mean", "ridge on embeddings"] in rows
    assert ["RMSE", "0.500 [0.450, 0.550]", "1.100 [1.000, 1.200]", "0.900 [0.850, 0.950]"] in rows
    assert ["Recall", "0.750 [0.700, 0.800]", "-", "-"] in rows
    assert '<td class="num main">0.500 <span class="interval">[0.450, 0.550]</span></td>' in report.html
    assert '<td class="num">0.900 <span class="interval">[0.850, 0.950]</span></td>' in report.html


def test_the_report_has_everything_and_the_card_what_a_stranger_needs(tmp_path) -> None:
    report, card = read_pages(write_run(tmp_path, affinity_results()))
    words = re.sub(r"\s+", " ", re.sub(r"[|`\\-]", " ", card))
    both = [
        "AffinityModel of 12,345,678 parameters, 345,678 of them trained.",
        f"facebook/esm2_t6_8M_UR50D, revision {COMMIT[:12]}",
        "Rows whose heavy is not in training: 31 rows.",
        "In brackets: 95 % intervals, by resampling the test rows.",
        "Undefined, Spearman of training mean: all 40 predictions are equal (7.5).",
        "labels at or above 9 count as positive, 10 % of the rows",
        "Spearman's rho within single groups:",
        "Early stopping stopped training at step 300.",
        "Predictions are the weighted mean of 2 of 3 heads on the embeddings, chosen in 12.5 s.",
        "2 of 40 rows are new to training in antigen: these 2 are too few to be scored apart (it takes 30).",
        "Baseline ridge on embeddings: fitted on 2,000 of 2,400 training rows.",
        "Rejected, the label is missing: 10.",
        "Column heavy: lower case in 12 rows.",
        "Split by: random, seed 42. split rows share",
        "packing (same mathematics)",
        "Seed 7, 1 x cpu, torch 2.13.0.",
        "max_length 130 allows: 2 of 900 sequences. Their ends are cut off.",
        "It needs the weights of esm, which came from a local folder",
        "Lin et al. 2023, https://doi.org/10.1126/science.ade2574",
    ]
    assert [text for text in both if text not in report.text] == []
    assert [text for text in both if re.sub(r"[-`]", " ", text).split("(")[0] not in words] == []
    alone = [
        "half of a batch is padding; ratio 2.200",
        "1 not asked for",
        "All 6 evaluations",
        "whole run, wall clock 15 min",
        "GPU utilization 70 %",
        "Next: --use_peft fine-tunes.",
        "mAb3",
        "learning_rate 0.001 recipe",
    ]
    assert [text for text in alone if text not in report.text] == []
    assert [text for text in alone if text in words] == []  # of these names of groups are the user's data


def test_the_speed_over_a_baseline_is_in_both_and_what_the_sessions_cost_in_the_report(tmp_path) -> None:
    settings = {**affinity_results()["settings"], "baseline_rate": "1.59", "dollars_per_hour": [1.89]}
    speed = {"train_batches_per_s": 4.77, "train_rows_per_s": 57.2, "train_speed_vs_baseline": 3.0}
    train = {**affinity_results()["train"], **speed}
    for name, given in (("a", {"settings": settings, "train": train}), ("b", {})):
        report, card = read_pages(write_run(tmp_path / name, affinity_results(**given)))
        row = ["speed", "3.00x the baseline", "4.77 batches/s, 57.2 rows/s; against 1.59 (--baseline_rate)"]
        assert (row in table_rows(card)) == (name == "a")
        assert (" ".join(row) in report.text) == (name == "a")
        assert ("cost $0.47, at $1.89 an hour" in report.text) == (name == "a")  # of 900 s: a quarter of it


def test_a_limit_stands_there_when_the_run_recorded_it_and_only_then(tmp_path) -> None:
    limits = [
        ("verdict.is_better", False, "It is not better than a trivial predictor"),
        ("verdict", {"is_better": False, "baseline": "3-mer ridge"}, "It is not better than 3-mer ridge: prefer that"),
        ("verdict.is_better", None, "is not decided by this run"),
        ("data.source", None, "Trained on generated demo data"),
        ("data.streaming", True, "The data was streamed"),
        ("data.split.rule", "cluster", "Similar sequences were kept on one side"),
        ("data.split.rule", "group:antigen", "Whole groups were held out (group:antigen)"),
        ("data.split.rule", "column:fold", "The split came with the data (column:fold)"),
        ("data.leaks.row.num_test_rows_in_train", 5, "5 of 300 test rows (1.7%) stand in train, too. On these, any"),
        ("data.inputs.heavy", {"longest": 600}, "the longest input seen has 600 residues; longer ones are untested."),
        ("labels.train.censored_share", 0.25, "25 % of the train labels are bounds, taken as exact."),
        ("labels.train.max", 11.0, "Training labels go from 4 to 11; a prediction outside"),
        ("settings.save_full", False, "It needs the weights of esm"),
    ]
    _, usual = read_pages(write_run(tmp_path / "usual", changed("settings.save_full", True)))
    for number, (path, value, sentence) in enumerate(limits):
        report, card = read_pages(write_run(tmp_path / str(number), changed(path, value), num_rows=0, log=[]))
        assert sentence in section(card, "Limits")
        assert sentence in report.text
        assert sentence not in section(usual, "Limits")
    near = "Every one of 1 checked test rows (of 300) has a training sequence at >= 70% identity in every column."
    assert near in section(usual, "Limits")


def test_figures_are_drawn_into_the_page_and_said_in_words(tmp_path) -> None:
    report, card = read_pages(write_run(tmp_path, affinity_results()))
    assert re.findall(r'<svg [^>]*role="img" aria-label="([^"]*)"', report.html) == [
        "Predicted against measured pKd, 120 test rows",
        "loss by step: training, validation, all rows",
        "spearman by step: validation, all rows",
    ]
    assert report.html.count("<figcaption>") == report.html.count("<svg ") == 3
    assert "![" not in card  # no picture lies in the folder
    for name in ("loss.png", "scatter.png"):
        (tmp_path / name).write_bytes(b"")
    assert re.findall(r"!\[\w+\]\((\w+\.png)\)", read_pages(tmp_path)[1]) == ["scatter.png", "loss.png"]
    write_predictions(tmp_path / "predictions.csv", 60, constant=7.5)
    report, _ = read_pages(tmp_path)
    assert "60 test rows" in report.html


def test_a_run_of_an_earlier_version_has_a_page_of_what_it_left(tmp_path) -> None:
    report, card = read_pages(write_run(tmp_path / "run", affinity_results(), has_page=False))
    for text in (report.text, card):
        for words in (
            VERDICT,
            "0.800 [0.750, 0.850]",
            "best baseline: 0.600",
            "Split by: random",
            "packing",
            "3 alarms",
        ):
            assert words in text or words == "3 alarms"
    assert ["RMSE", "0.500 [0.450, 0.550]", "1.100 [1.000, 1.200]", "0.900 [0.850, 0.950]"] in table_rows(card)
    assert "How to load it" not in card
    _, card = read_pages(write_run(tmp_path / "mlm", masked_lm_results(), num_rows=0, has_page=False))
    assert ["Perplexity", "8.170", "16.590"] in table_rows(card)


def test_what_is_absent_is_not_measured(tmp_path) -> None:
    report, _ = read_pages(write_run(tmp_path / "run", {"task": "affinity"}, num_rows=0, plan=None, log=[]))
    for words in (
        "No verdict: this run was not compared with any baseline.",
        "score not measured no test split was scored",
        "Not measured: the run has no scores of a test split.",
        "Not recorded: the run has no data report.",
        "Not recorded: the run left no plan.json.",
    ):
        assert words in report.text
    assert "at not measured" not in report.text


def test_folders_and_tokens_of_this_machine_stay_here(tmp_path) -> None:
    results = affinity_results()
    results["command"] = (
        "hf-ext train --output_dir /home/somebody/runs/first --dataset_name=../secret-folder/a.csv -s 7"
    )
    report, card = read_pages(write_run(tmp_path / "first", results))
    for text in (report.html, card):
        assert not {"somebody", "home", "secret", "hub_token"} & {*re.findall(r"[a-z_]+", text)}
        assert "hf_xxx" not in text
        assert str(tmp_path.parent) not in text
        assert "--output_dir first --dataset_name=a.csv -s 7" in text
    assert "init_head_from frozen command line" in report.text


def test_only_absolute_paths_are_shortened() -> None:
    for text, expected in (
        ("/home/a/runs/first", ".../first"),
        ("--output_dir /tmp/x/y --seed 7", "--output_dir .../y --seed 7"),
        ("['/data/a.csv', '~/b/c.csv']", "['.../a.csv', '.../c.csv']"),
        ("C:\\Users\\a\\runs\\first", ".../first"),
        ("facebook/esm2_t6_8M_UR50D", "facebook/esm2_t6_8M_UR50D"),
        ("data/gb1.csv.gz and ../other/x.csv", "data/gb1.csv.gz and ../other/x.csv"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("1/2 residues / s", "1/2 residues / s"),
    ):
        assert hide_folders(text) == expected


def test_text_is_readable_in_light_in_dark_and_in_print(tmp_path) -> None:
    report, _ = read_pages(write_run(tmp_path, {"format": 1}, num_rows=0, plan=None, log=[]))
    found = palettes(report.html)
    assert set(found) == {"light", "dark", "print"}
    for name, colours in found.items():
        for text in ("ink", "soft", "link", "good", "bad"):
            for ground in ("paper", "panel"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (name, text, ground)
        for series in ("c1", "c2", "c3", "c4", "c5", "c6"):
            assert contrast(colours[series], colours["paper"]) >= 3, (name, series)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # the grey that just fails


def test_a_folder_that_is_no_finished_run_is_refused_by_name(tmp_path) -> None:
    page = '{"page": {"format": 1, "title": "x", "results": [{"kind": "none"}]}}'
    ours = '{"format": 1}'
    for number, (files, said) in enumerate(
        [
            ({}, "holds no all_results.json, so it is not the folder of a finished run"),
            ({"all_results.json": "{"}, "all_results.json: not JSON"),
            ({"all_results.json": "[]"}, "all_results.json: holds a list"),
            ({"all_results.json": "{}"}, "holds no record of a run of hf_ext"),
            ({"all_results.json": '{"format": 2}'}, "format 2, this hf_ext reads format 1"),
            ({"all_results.json": '{"page": {"format": 2}}'}, "page of format 2, this hf_ext reads format 1"),
            ({"all_results.json": page}, "its entry 'page' is damaged"),
            ({"all_results.json": '{"page": {"title": ["x"]}}'}, "its entry 'page' is damaged"),
            ({"all_results.json": ours, "plan.json": "x"}, "plan.json: not JSON"),
            (
                {"all_results.json": ours, "predictions.csv": "label,prediction\n1,2\n3,x\n"},
                "line 3, column prediction: 'x'",
            ),
            ({"all_results.json": ours, "predictions.csv": "label,prediction\n1\n"}, "line 2: 1 cells for 2 columns"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with pytest.raises(DataError, match=re.escape(said)):
            write_report(folder)
        assert not (folder / "report.html").exists()


def test_what_of_a_page_is_of_another_type_is_left_out(tmp_path, caplog) -> None:
    (tmp_path / "all_results.json").write_text(
        '{"page": {"title": "x", "summary": 3, "numbers": "y", "limits": ["z", 1]}}'
    )
    report, _ = read_pages(write_report(tmp_path).parent)
    assert "z" in report.text
    assert [f"page, {name} is left out" in caplog.text for name in ("summary", "numbers", "limits, 2")] == [True] * 3


def test_steps_that_were_left_out_or_did_not_fit_are_counted_and_are_no_evaluation(tmp_path) -> None:
    log = [{"skipped_step": 3, "step": 2}, {"skipped_step": 9, "step": 8}, {"batch_parts": 2, "step": 4}]
    folder = write_run(tmp_path, affinity_results(), num_rows=0, log=log)
    text = re.sub(r"<[^>]+>|\s+", " ", write_report(folder).read_text())
    assert re.search(r"steps left out, as not finite +2 ", text)
    assert re.search(r"times that memory did not suffice for a step +1 ", text)
    assert "All 1 evaluations" not in text


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path) -> None:
    log = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}]
    folder = write_run(tmp_path, affinity_results(), num_rows=0, log=log)
    (folder / "predictions.csv").write_text("label,prediction\n1,nan\n2,2.5\n,3\n3,3.5\n")
    report, _ = read_pages(folder)
    assert report.problems == []
    assert "2 rows without a finite label and prediction are left out." in report.text


@pytest.mark.nightly
def test_a_page_of_24000_rows_stays_below_400_kB_and_is_the_same_twice(tmp_path) -> None:
    folder = write_run(tmp_path, affinity_results(), num_rows=24_000)
    report, _ = read_pages(folder)
    assert len(report.html.encode()) < 400_000
    assert "24,000 test rows in cells" in report.html
    assert read_pages(folder)[0].html == report.html


def test_the_command_reads_json_and_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", affinity_results(), num_rows=0)
    code = (
        "import sys; from hf_ext.cli import main; main(['report', '--run', sys.argv[1]]); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    wrote = [f"Wrote {tmp_path}/run/{name}" for name in ("report.html", "README.md")]
    assert done.stdout.splitlines() == [*wrote, "[]"], done.stderr
    assert json.loads((tmp_path / "run" / "all_results.json").read_text())["page"]["format"] == 1
