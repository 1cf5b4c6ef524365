"""The Colab notebook as a user runs it, and a FastTrainer inside a notebook's kernel."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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


def execute(notebook, folder: Path, monkeypatch):
    """Runs all cells in `folder`, offline; a kernel inherits this process's environment."""
    for name, value in {"HF_HOME": str(folder / "hf_home"), "IPYTHONDIR": str(folder / "ipython")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return notebook


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def find_cell(notebook, text: str):
    return next(cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)


def test_the_notebook_is_small_valid_and_stores_no_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, len(notebook.cells)) == (4, 12)
    assert len({cell.id for cell in notebook.cells}) == 12
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) < 45
    addresses = re.findall(r"https?://[^\s\"')]+", NOTEBOOK.read_text())
    assert [address for address in addresses if address != "https://\\"] == []


@pytest.mark.nightly
def test_it_runs_whole_asks_the_doctor_shows_speed_verdict_and_report_and_shares_nothing_unasked(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for text, old, new in (
        ("REPO =", 'REPO = ".."', f"REPO = {str(ROOT)!r}"),
        ('ARGUMENTS = ["--num_train_epochs"', '"3"', '"3", "--head", "mlp"'),  # a search for a head is more training
        ("doctor", "*ARGUMENTS", '*ARGUMENTS, "--measure_seconds", "0.1"'),
    ):
        cell = find_cell(notebook, text)
        cell.source = cell.source.replace(old, new)
        assert new in cell.source
    execute(notebook, tmp_path, monkeypatch)
    page = printed(find_cell(notebook, '"doctor"'))
    assert "This command would run on " in page
    assert "plan, preset max_speed: " in page
    first = printed(find_cell(notebook, 'max_speed.py", *ARGUMENTS)'))
    assert re.search(r"^Step \d+ of \d+: .* batches/s, .* left", first, re.MULTILINE)
    assert printed(find_cell(notebook, "get_token")).startswith("Not shared: ")
    shown = find_cell(notebook, "predictions.csv")
    assert "spearman" in printed(shown).lower()
    pages = [output["data"]["text/html"] for output in shown.outputs if "text/html" in output.get("data", {})]
    assert "<th>prediction</th>" in pages[0]
    assert "<iframe srcdoc=" in pages[1]
    told = [output["text"] for output in shown.outputs if output.get("name") == "stderr"]
    assert not [text for text in told if "IProgress not found" not in text]  # tqdm, where ipywidgets is not installed
    assert (tmp_path / "outputs" / "colab" / "report.html").is_file()


@pytest.mark.nightly
def test_a_fast_trainer_trains_inside_a_kernel_and_shows_its_table(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_KERNEL)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (cell,) = execute(notebook, tmp_path, monkeypatch).cells
    assert "8 [" in printed(cell)
    assert "NotebookProgressCallback" in printed(cell)
    tables = [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    assert "<th>Training Loss</th>" in tables[-1]
    assert re.search(r" batches/s, .* left.*<br>", tables[-1])
    assert (tmp_path / "in_kernel" / "checkpoint-8").is_dir()
