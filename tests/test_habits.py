"""What the repository's host reads: workflow, hooks, citation, issue form; and the script of the nightly versions."""

import os
import re
from pathlib import Path

import yaml
from locations import ROOT

import hf_ext

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="ascii"))


def lower_bounds() -> dict[str, str]:
    """The oldest version of each of the five that setup.py allows, as major.minor."""
    found = dict(re.findall(r'"([a-z]+)>=([\d.]+)', (ROOT / "setup.py").read_text()))
    return {name: (found[name] + ".0").split(".")[0] + "." + (found[name] + ".0").split(".")[1] for name in PACKAGES}


def test_the_workflow_runs_the_script_that_people_run():
    jobs = load(WORKFLOW)["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert steps == [".ci/run", ".ci/nightly ${{ matrix.versions }}"]
    for script in ("run", "nightly"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)
    assert load(WORKFLOW)["permissions"] == {"contents": "read"}
    checks = (ROOT / ".ci" / "run").read_text().splitlines()[-4:]
    assert checks == ["ruff check .", "ruff format --check .", "mypy", "pytest"]  # what is quick to fail comes first


def test_the_citation_is_of_this_version():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # which the format demands
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == hf_ext.__version__  # at a release both change
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "hf_ext contributors"}]


def test_each_step_of_a_release_is_a_command_whose_files_exist():
    text = (ROOT / "docs" / "releasing.md").read_text(encoding="ascii")
    steps = re.split(r"(?m)^\d+\. ", text)[1:]
    assert len(steps) == 7
    assert all("```bash" in step for step in steps)
    for name in re.findall(r"(?:\.ci|benchmarks|hf_ext)/[\w.]+|CITATION\.cff|CHANGELOG\.md", text):
        assert (ROOT / name).exists(), name
    oldest = " ".join(f"'{name}=={version}.*'" for name, version in lower_bounds().items())
    assert f"NIGHTLY=1 .ci/nightly {oldest}\n" in text
