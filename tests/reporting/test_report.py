"""The run report: what a person who was not there reads first, and what no page may do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from page_checks import Page, contrast, palettes
from report_runs import (
    VERDICT,
    affinity_results,
    make_score,
    masked_lm_results,
    operator_results,
    write_predictions,
    write_run,
)

from hf_ext.errors import DataError
from hf_ext.reporting.report import write_report

HOSTILE = "<script>alert(1)</script>\n# Heading [x](http://evil) | `b"


def read_report(folder: Path) -> tuple[Page, str, str]:
    html, markdown = write_report(folder)
    text = html.read_text(encoding="utf-8")
    return Page(text), text, markdown.read_text(encoding="utf-8")


def hostile_results() -> dict:
    score = make_score(0.5, groups={HOSTILE: {"value": 0.1, "n": 4, "undefined": HOSTILE}})
    return affinity_results(
        verdict={"text": HOSTILE, "is_better": False},
        test={
            "num_rows": 40,
            "scores": {
                HOSTILE: {HOSTILE: score, "per_group_spearman": score},
                "model": {"spearman": score, "per_group_spearman": score},
            },
            "notes": [HOSTILE],
        },
        settings={"label_column": HOSTILE, HOSTILE: HOSTILE},
        settings_from={HOSTILE: HOSTILE},
        alarms=[{"step": 1, "name": HOSTILE, "alarms": [HOSTILE]}],
        advice=[HOSTILE],
        command=HOSTILE,
    )


def write_case(name: str, folder: Path) -> Path:
    """One of the runs that a report must make sense of."""
    if name == "constant predictions":
        write_run(folder, affinity_results(), num_rows=0)
        write_predictions(folder / "predictions.csv", 60, constant=7.5)
        return folder
    test = {"num_rows": 1, "scores": {"model": {"spearman": make_score(None), "rmse": make_score(0.3)}}}
    cases = {
        "everything": (affinity_results(), {}),
        "one test row": (affinity_results(test=test, seeds=None), {"num_rows": 1}),
        "no test split": (affinity_results(test=None, verdict=None), {"num_rows": 0}),
        "stream": (affinity_results(data={"streaming": True, "source": "a/b"}, labels=None), {}),
        "not stopped early": (affinity_results(early_stopping={"patience": 3, "stopped_at_step": None}), {}),
        "masked_lm": (masked_lm_results(), {"num_rows": 0}),
        "operator": (operator_results(settings={"resolution": 32}), {"num_rows": 0}),
        "nothing but a record": ({}, {"num_rows": 0, "plan": None, "log": []}),
        "hostile": (hostile_results(), {}),
    }
    results, options = cases[name]
    return write_run(folder, results, **options)


CASES = (
    *("everything", "one test row", "no test split", "stream", "not stopped early", "masked_lm"),
    *("operator", "nothing but a record", "hostile", "constant predictions"),
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_every_page_is_whole_loads_nothing_and_runs_nothing(tmp_path, name) -> None:
    page, html, markdown = read_report(write_case(name, tmp_path))
    assert page.problems == []
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    assert "default-src 'none'; style-src 'unsafe-inline'" in html
    assert page.links == ["#result", "#training", "#data", "#plan", "#cost", "#reproduce"]
    assert "nan" not in re.findall(r"[a-z]+", " ".join(page.texts).lower())
    assert not re.search(r"\bNone\b|\{'|\[\]", " ".join(page.texts) + markdown)
    assert tables_with_uneven_rows(markdown) == []


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ("<p><b>x</p></b>", "</p> at line 1 closes ['b']"),
        ("<section>", "<section> stays open"),
        ('<a href="#gone">x</a>', "link #gone leads nowhere"),
        ('<p id="a"></p><p id="a"></p>', "id a twice"),
        ('<img src="https://x.y/z.png">', "<img src=https://x.y/z.png> loads"),
        ('<link href="style.css">', "<link href=style.css> loads"),
        ("<script></script>", "<script>"),
        ('<p onclick="x()"></p>', "<p onclick> runs code"),
        ("<style>a { background: url(x.png) }</style>", "style loads x.png"),
    ],
)
def test_the_check_of_pages_sees_what_is_wrong(html, problem) -> None:
    assert Page(html).problems[0] == problem


def tables_with_uneven_rows(markdown: str) -> list[str]:
    """Lines of GitHub tables whose number of cells is not that of the line before."""
    wrong, previous = [], 0
    for line in markdown.splitlines():
        if not line.startswith("| "):
            previous = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        if previous and cells != previous:
            wrong.append(line)
        previous = cells
    return wrong


def test_the_check_of_tables_sees_a_missing_cell() -> None:
    assert tables_with_uneven_rows("| a | b |\n| - | - |\n| 1 |\n") == ["| 1 |"]
    assert tables_with_uneven_rows("| a \\| c | b |\n| - | - |\n") == []


def test_the_verdict_is_read_first_and_alarms_right_after_it(tmp_path) -> None:
    page, _, markdown = read_report(write_run(tmp_path, affinity_results()))
    start = page.texts.index(VERDICT)
    assert page.texts[start - 1] == "Predicting pKd from heavy, light and antigen"
    assert page.texts[start + 1 : start + 5] == [
        "3 alarms",
        "Test predictions: RMSE 2.1025 is no better than the 2.1001 of a constant.",
        "Training, step 100: 9 distinct values in 512 predictions.",
        "Labels of train: 36.6 % are exactly 6.",
    ]
    assert markdown.splitlines()[:5] == [
        "# Predicting pKd from heavy, light and antigen",
        "",
        f"**{VERDICT}**",
        "",
        "- **ALARM** Test predictions: RMSE 2.1025 is no better than the 2.1001 of a constant.",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("is_better", "name"), [(True, "better"), (False, "worse"), (None, "open")])
def test_the_verdict_has_the_colour_of_its_outcome(tmp_path, is_better, name) -> None:
    results = affinity_results(verdict={"text": VERDICT, "is_better": is_better})
    _, html, _ = read_report(write_run(tmp_path, results))
    assert f'<p class="verdict {name}">' in html


def test_key_numbers_hold_the_score_against_the_best_baseline(tmp_path) -> None:
    _, _, markdown = read_report(write_run(tmp_path, affinity_results()))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines()[12:18]]
    assert rows == [
        ["Spearman on test", "0.800 [0.750, 0.850]", "best baseline: 0.600, ridge on embeddings"],
        ["RMSE on test", "0.500 [0.450, 0.550]", "best baseline: 0.900, ridge on embeddings"],
        ["training rows", "2,400", "seen 3 times"],
        ["training time", "12 min 34 s", "at 187,770 residues / s"],
        ["peak memory", "1.25 GiB", "of the process"],
        ["cost", "$0.09", "at $0.35 per hour"],
    ]


@pytest.mark.nightly
def test_a_teacher_is_no_baseline(tmp_path) -> None:
    results = affinity_results()
    results["test"]["scores"]["teacher"] = {"spearman": make_score(0.9, 0.85, 0.95), "rmse": make_score(0.1)}
    _, _, markdown = read_report(write_run(tmp_path, results))
    assert markdown.count("| best baseline: 0.600, ridge on embeddings |") == 1


def test_predictors_stand_side_by_side_with_the_model_marked(tmp_path) -> None:
    _, html, markdown = read_report(write_run(tmp_path, affinity_results()))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "|" in line]
    assert ["", "model", "training mean", "ridge on embeddings"] in rows
    assert ["RMSE", "0.500 [0.450, 0.550]", "1.100 [1.000, 1.200]", "0.900 [0.850, 0.950]"] in rows
    assert '<td class="num main">0.500 <span class="interval">[0.450, 0.550]</span></td>' in html
    assert '<td class="num">0.900 <span class="interval">[0.850, 0.950]</span></td>' in html


@pytest.mark.nightly
def test_the_report_says_what_was_trained_on_what_and_how_to_repeat_it(tmp_path) -> None:
    page, _, markdown = read_report(write_run(tmp_path, affinity_results()))
    text = " ".join(page.texts)
    for sentence in (
        "AffinityModel of 12,345,678 parameters, 345,678 of them trained.",
        "facebook/esm2_t6_8M_UR50D abc123 frozen heavy + light .../esm not pinned lora antigen",
        "Rows whose heavy is not in training: 31 rows.",
        "Undefined, Spearman of training mean: all 40 predictions are equal (7.5).",
        "Early stopping stopped training at step 300.",
        "3 heads: steps, scores on validation and curves here are those of the first, seed 7.",
        "3 heads that differ in their seed (7, 8, 9), on the same test rows.",
        "0.790 +- 0.010 0.810 [0.760, 0.860]",
        "teacher .../teacher share of the teacher in a label 0.500",
        "2 of 40 rows are new to training in antigen: these 2 are too few to be scored apart (it takes 30).",
        "Baseline ridge on embeddings: fitted on 2,000 of 2,400 training rows.",
        "Rejected, the label is missing: 10.",
        "Column heavy: lower case in 12 rows.",
        "Split by: random, seed 42. split rows share train 2,400 80 %",
        "heavy 299 of 300 39 of 40 0 of 1 1 of 1",
        "packing applied identical half of a batch is padding; ratio 2.200",
        "1 not asked for",
        "accelerate launch recipes/max_speed.py --output_dir .../first --seed 7",
        "commit not recorded",
        "faesm not installed",
    ):
        assert sentence in text, sentence
        words = re.sub(r"\s+", " ", re.sub(r"[|`\\]", " ", markdown))
        assert sentence.split(". ")[0] in words or "/" in sentence or "rows share" in sentence, sentence


def test_seven_figures_are_drawn_into_the_page_and_said_in_words(tmp_path) -> None:
    _, html, markdown = read_report(write_run(tmp_path, affinity_results()))
    assert re.findall(r'<svg [^>]*role="img" aria-label="([^"]*)"', html) == [
        "Predicted against measured pKd, 120 test rows",
        "Mean measured pKd in 10 parts of the rows, by prediction",
        "Histogram of measured and predicted pKd on the test split",
        "Spearman of 9 groups",
        "loss by step: training, subset, all rows",
        "spearman by step: subset, all rows",
        "Histogram of sequence lengths on the test split. heavy: 90 to 130; antigen: 60 to 66 residues",
    ]
    assert html.count("<figcaption>") == html.count("<svg ") == 7
    assert "![" not in markdown  # no image lies in the folder


def test_markdown_shows_the_images_that_lie_beside_it(tmp_path) -> None:
    folder = write_run(tmp_path, affinity_results())
    for name in ("loss.png", "scatter.png"):
        (folder / name).write_bytes(b"")
    _, _, markdown = read_report(folder)
    assert re.findall(r"\]\((\w+\.png)\)", markdown) == ["scatter.png", "loss.png"]


@pytest.mark.nightly
def test_nothing_of_a_run_becomes_markup(tmp_path) -> None:
    page, html, markdown = read_report(write_run(tmp_path, hostile_results()))
    assert page.problems == []
    assert "script" not in page.tags
    assert html.count("&lt;script&gt;alert(1)") > 10
    outside_code = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown, flags=re.DOTALL)
    assert "<script" not in outside_code
    assert "](http" not in outside_code
    assert [line for line in outside_code.splitlines() if line.startswith("# ")] == [markdown.splitlines()[0]]


def test_folders_of_this_machine_are_cut_to_their_last_part(tmp_path) -> None:
    _, html, markdown = read_report(write_run(tmp_path, affinity_results()))
    assert "/home" not in html + markdown
    assert str(tmp_path.parent) not in html + markdown


def test_what_is_absent_is_not_measured(tmp_path) -> None:
    page, _, _ = read_report(write_run(tmp_path, {}, num_rows=0, plan=None, log=[]))
    text = " ".join(page.texts)
    assert "No verdict: this run was not compared with any baseline." in text
    assert "test score not measured no test split was scored" in text
    assert "training time not measured at not measured" not in text
    for section in ("Not recorded: the run has no data report.", "Not recorded: the run left no plan.json."):
        assert section in text
    assert not [word for word in re.findall(r"\d+", text) if len(word) > 1]


@pytest.mark.nightly
def test_a_stream_says_that_its_rows_are_not_counted(tmp_path) -> None:
    page, _, _ = read_report(write_case("stream", tmp_path))
    assert "Rows were streamed, so they are not counted and leaks between splits are not looked for." in page.texts


def test_constant_predictions_are_drawn_and_not_calibrated(tmp_path) -> None:
    page, html, _ = read_report(write_case("constant predictions", tmp_path))
    assert "60 test rows" in html
    assert "Calibration" not in " ".join(page.texts)


def test_masked_language_models_stand_beside_residue_frequencies(tmp_path) -> None:
    page, _, markdown = read_report(write_case("masked_lm", tmp_path))
    text = " ".join(page.texts)
    assert "perplexity on test 8.170 residue frequencies: 16.590" in text
    assert "accuracy on test 41 % residue frequencies: 12 %" in text
    assert "1,000 of them trained. It began as .../esm, not pinned." in text
    assert re.search(r"\| test, unigram +\| +2.100 \| +16.590 \| +0.120 \|", markdown)


@pytest.mark.nightly
def test_a_page_of_24000_rows_stays_below_400_kB(tmp_path) -> None:
    _, html, _ = read_report(write_run(tmp_path, affinity_results(), num_rows=24_000))
    assert len(html.encode()) < 400_000
    assert "24,000 test rows in cells" in html


@pytest.mark.nightly
def test_two_reports_of_one_run_are_the_same_bytes(tmp_path) -> None:
    write_run(tmp_path, affinity_results())
    assert read_report(tmp_path)[1:] == read_report(tmp_path)[1:]


def test_text_is_readable_in_light_in_dark_and_in_print(tmp_path) -> None:
    _, html, _ = read_report(write_run(tmp_path, {}, num_rows=0, plan=None, log=[]))
    found = palettes(html)
    assert set(found) == {"light", "dark", "print"}
    for name, colours in found.items():
        for text in ("ink", "soft", "link", "good", "bad"):
            for ground in ("paper", "panel"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (name, text, ground)
        for series in ("c1", "c2", "c3", "c4", "c5", "c6"):
            assert contrast(colours[series], colours["paper"]) >= 3, (name, series)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # the grey that just fails
    assert contrast("#ffffff", "#ffffff") == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no all_results.json, so it is not the folder of a finished run"),
        ({"all_results.json": "{"}, "all_results.json: not JSON"),
        ({"all_results.json": "[]"}, "all_results.json: holds a list"),
        ({"all_results.json": '{"format": 2}'}, "format 2, this hf_ext reads format 1"),
        (
            {"all_results.json": '{"task": "folding"}'},
            "task 'folding', this hf_ext writes pages of affinity, masked_",
        ),
        ({}, "mlm.py, generate_antibody.py or pde_operator.py that came to its end"),
        ({"all_results.json": "{}", "plan.json": "x"}, "plan.json: not JSON"),
        (
            {"all_results.json": "{}", "predictions.csv": "label,prediction\n1,2\n3,x\n"},
            "line 3, column prediction: 'x'",
        ),
        ({"all_results.json": "{}", "predictions.csv": "label,prediction\n1\n"}, "line 2: 1 cells for 2 columns"),
    ],
)
def test_a_folder_that_is_no_finished_run_is_refused_by_name(tmp_path, files, said) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(said)) as error:
        write_report(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path) -> None:
    folder = write_run(tmp_path, affinity_results(), num_rows=0)
    log = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (folder / "predictions.csv").write_text("label,prediction\n1,nan\n2,2.5\n,3\n3,3.5\n")
    page, _, _ = read_report(folder)
    assert page.problems == []
    assert "2 rows without a finite label and prediction are left out." in " ".join(page.texts)


@pytest.mark.nightly
def test_a_browser_renders_the_page_without_a_message(tmp_path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here")
    html, _ = write_report(write_run(tmp_path, affinity_results()))
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/c",
    ]
    for width in (1280, 500):
        shot = tmp_path / f"{width}.png"
        command = [chromium, *options, f"--window-size={width},2000", f"--screenshot={shot}", html.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
        assert shot.stat().st_size > 20_000
        assert "CONSOLE" not in done.stderr
