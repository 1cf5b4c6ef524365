"""The Colab notebook as a user runs it, and a FastTrainer inside a notebook's kernel."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from hf_ext.arguments import parse_command
from hf_ext.property import TASK
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "recipes" / "colab_max_speed.ipynb"
IN_KERNEL = """
import torch
from datasets import Dataset
from transformers import EsmConfig, EsmForSequenceClassification
from transformers.utils.notebook import NotebookProgressCallback

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

config = EsmConfig(
    vocab_size=33, pad_token_id=1, mask_token_id=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=32, position_embedding_type="rotary", num_labels=1, problem_type="regression",
)
rows = Dataset.from_dict({
    "input_ids": [[0, 5, 6, 7 + i % 4, 2] for i in range(32)], "labels": [float(i % 4) for i in range(32)],
})
args = FastTrainingArguments(
    output_dir="in_kernel", num_train_epochs=2, eval_strategy="epoch", logging_strategy="epoch", report_to="none",
    per_device_train_batch_size=8, use_cpu=True, save_strategy="epoch",
)
trainer = FastTrainer(EsmForSequenceClassification(config), args, train_dataset=rows, eval_dataset=rows)
output = trainer.train()
trainer.end()
print(output.global_step, [type(c).__name__ for c in trainer.callback_handler.callbacks])
"""


def make_environment(folder: Path) -> Path:
    """The Python of a new environment that has all packages of this one but hf_ext."""
    venv.create(folder, symlinks=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    linked = set()
    for place in map(Path, sys.path):
        for path in place.iterdir() if place.name in ("site-packages", "dist-packages") else ():
            name = (path.name.partition("-")[0], path.suffix)  # without the version: the first of a package counts
            if "hf_ext" not in path.name and name not in linked and path.suffix != ".pth":
                linked.add(name)
                (own / path.name).symlink_to(path)
    return folder / "bin" / "python"


def execute(notebook, folder: Path, monkeypatch, python: Path | str = sys.executable):
    """Runs all cells in `folder`, offline, with a kernel of `python`, which inherits this process's environment."""
    data = folder.parent / "jupyter"
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "user's"}
    (data / "kernels" / "user").mkdir(parents=True)
    (data / "kernels" / "user" / "kernel.json").write_text(json.dumps(kernel))
    for name in ("HF_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder.parent / name))
    monkeypatch.setenv("JUPYTER_PATH", str(data))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}.items():  # "0" is how pip reads "none"
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=600, kernel_name="user", resources={"metadata": {"path": folder}}).execute()
    return notebook


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    """The Python of a user who has not installed hf_ext yet."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return make_environment(tmp_path / "environment")


def copy_clone(folder: Path) -> Path:
    """What a clone has, without history and results."""
    left_out = shutil.ignore_patterns(".git", "outputs", "*_cache", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def stopped(cells) -> list[bool]:
    """Of each code cell, whether it ran."""
    return [bool(cell.execution_count) for cell in cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def find_cell(notebook, text: str):
    return next(cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)


def test_the_notebook_is_small_valid_and_stores_no_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, len(notebook.cells)) == (4, 13)
    assert len({cell.id for cell in notebook.cells}) == 13
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) < 45
    addresses = re.findall(r"https?://[\w.]*", NOTEBOOK.read_text())
    assert {*addresses} == {"https://", "https://..."}  # nothing is published


def test_run_all_without_hf_ext_stops_at_the_first_cell_and_says_what_to_set(tmp_path, user, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (tmp_path / "content").mkdir()
    with pytest.raises(CellExecutionError) as end:
        execute(notebook, tmp_path / "content", monkeypatch, user)
    assert stopped(notebook.cells) == [True] + [False] * 8
    last = str(end.value).strip().splitlines()[-1]
    assert f"hf_ext is not installed, and REPO = '..' ({tmp_path}) is no clone of it. " in last
    assert "Set REPO above to the git address of the repository that this notebook is from" in last
    assert not [*(tmp_path / "content").iterdir()]


def test_a_failed_install_ends_run_all_with_what_pip_said(tmp_path, user, monkeypatch):
    recipes = tmp_path / "clone" / "recipes"
    for folder in (recipes, tmp_path / "clone" / "hf_ext"):
        folder.mkdir(parents=True)
    (tmp_path / "clone" / "setup.py").write_text("raise SystemExit('no setup here')")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.raises(CellExecutionError, match=r"pip install ended with status 1\. The lines above say why"):
        execute(notebook, recipes, monkeypatch, user)
    assert stopped(notebook.cells) == [True, True] + [False] * 7
    assert "no setup here" in printed(find_cell(notebook, '"install"'))


@pytest.mark.parametrize(("demo", "output"), [(True, "outputs/demo"), (False, "outputs/colab")])
def test_on_colab_it_works_on_drive_with_small_checkpoints_on_the_machine_first(tmp_path, monkeypatch, demo, output):
    """Demo and own data meet in no folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    texts = [find_cell(notebook, text).source for text in ("TRAINING =", "def run", "drive.mount")]
    values = {}
    code = "\n".join(texts).replace("DEMO = True", f"DEMO = {demo}").replace('"/content', f'"{tmp_path}')
    monkeypatch.chdir(tmp_path)
    mounted = []
    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    (tmp_path / "data.csv").write_text("sequence,y\n")
    exec(code, values)
    assert mounted == [f"{tmp_path}/drive"]
    assert Path.cwd() == tmp_path / "drive" / "MyDrive" / "hf_ext"
    assert Path("data.csv").read_text() == "sequence,y\n"
    _, arguments = parse_command(TASK.all_arguments, TASK.defaults, None, values["ARGUMENTS"])
    (args,) = (each for each in arguments if isinstance(each, FastTrainingArguments))
    assert (args.output_dir, args.save_total_size_gb) == (output, 9)
    assert args.local_checkpoint_dir == f"{tmp_path}/{output}"


def test_the_speed_is_compared_with_an_old_script_by_rows(tmp_path, capsys):
    cell = find_cell(nbformat.read(NOTEBOOK, as_version=4), "rows_per_s =")
    values = {"OUTPUT": str(tmp_path), "BASELINE_RATE": 1.6, "BASELINE_ROWS": 8, "json": json, "Path": Path}
    values["results"] = {"data": {"sizes": {"train": 9216}}}
    logs = [{"loss": 1.0}, *({"sequences_per_s": rate} for rate in (100.0, 128.0, 900.0))]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    exec(cell.source, values)
    fast, times = capsys.readouterr().out.splitlines()
    assert fast.startswith("128 rows a second: 50 epochs take 1 h")
    assert times == "10 times the 12.8 rows a second of your old script."


@pytest.mark.nightly
def test_in_a_clone_its_own_hf_ext_is_installed(tmp_path, user, monkeypatch):
    recipes = copy_clone(tmp_path / "clone") / "recipes"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [*cells[:3], nbformat.v4.new_code_cell('run("-c", "import hf_ext; print(hf_ext.__file__)")')]
    execute(notebook, recipes, monkeypatch, user)
    assert printed(notebook.cells[-1]) == f"{tmp_path}/clone/hf_ext/__init__.py\n"


@pytest.mark.nightly
def test_in_an_empty_folder_it_runs_whole_from_a_git_address_and_shares_nothing_unasked(tmp_path, user, monkeypatch):
    """It asks the doctor, trains, trains nothing twice, shows verdict, report and speed, and leaves no clone behind."""
    clone = copy_clone(tmp_path / "clone")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = find_cell(notebook, "REPO =")
    settings.source = settings.source.replace('REPO = ".."', f'REPO = "git+file://{clone}"')
    training = find_cell(notebook, "# Several GPUs")
    again = nbformat.v4.new_code_cell(training.source)
    notebook.cells.insert(notebook.cells.index(training) + 1, again)
    folder = tmp_path / "content"
    folder.mkdir()
    execute(notebook, folder, monkeypatch, user)
    assert {path.name for path in folder.iterdir()} == {"outputs", "embeddings"}
    assert not re.search(r"^Step \d+ of \d+", printed(again), re.MULTILINE)
    assert re.search(r"50 epochs take [\d.]+ h", printed(find_cell(notebook, "rows_per_s =")))
    page = printed(find_cell(notebook, '"doctor"'))
    assert "This command would run on " in page
    assert "plan, preset max_speed: " in page
    first = printed(find_cell(notebook, "# Several GPUs"))
    assert re.search(r"^Step \d+ of \d+: .* batches/s, .* left", first, re.MULTILINE)
    assert printed(find_cell(notebook, "get_token")).startswith("Not shared: ")
    shown = find_cell(notebook, "predictions.csv")
    assert "spearman" in printed(shown).lower()
    pages = [output["data"]["text/html"] for output in shown.outputs if "text/html" in output.get("data", {})]
    assert "<th>prediction</th>" in pages[0]
    assert "<iframe srcdoc=" in pages[1]
    told = [output["text"] for output in shown.outputs if output.get("name") == "stderr"]
    assert not [text for text in told if "IProgress not found" not in text]  # tqdm, where ipywidgets is not installed
    assert (folder / "outputs" / "demo" / "report.html").is_file()


@pytest.mark.nightly
def test_a_fast_trainer_trains_inside_a_kernel_and_shows_its_table(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_KERNEL)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "work"
    folder.mkdir()
    (cell,) = execute(notebook, folder, monkeypatch).cells
    assert "8 [" in printed(cell)
    assert "NotebookProgressCallback" in printed(cell)
    tables = [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    assert "<th>Training Loss</th>" in tables[-1]
    assert re.search(r" batches/s, .* left.*<br>", tables[-1])
    assert (folder / "in_kernel" / "checkpoint-8").is_dir()
