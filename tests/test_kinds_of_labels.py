"""A kind of label is a class: what differs between kinds is asked of it, and no other file tells kinds apart."""

import re
from pathlib import Path
from typing import get_args

import pytest

from hf_ext.data import DataArguments
from hf_ext.evaluation.kinds import ROWS
from hf_ext.labels import KINDS, TaskChoice
from hf_ext.models.losses import LOSSES

pytestmark = pytest.mark.internals
PACKAGE = Path(__file__).resolve().parent.parent / "hf_ext"
ASKED = re.compile(
    r"\bis_one_number\b|\bper_residue\b|\bkind\.(?:is_\w+|task|kind)\b|\bONE_NUMBER\b|\bhas_probabilities\b"
    r"|\bisinstance\([\w.]*kind\b"
)
# Files outside labels/ that ask what kind of label there is, how often, and why. Each number may only fall.
ALLOWED = {
    "data/batches/collating.py": (2, "a collator that is not told anything has one number per row"),
    "finished/comparing.py": (2, "predictions.csv has bounds in a column of their own, and residues of cut sequences"),
    "finished/evaluate.py": (1, "labels of residues are cut to what the shortest model read"),
    "finished/export.py": (3, "a file has predictions of all tokens where residues have labels, and probabilities"),
    "generation/judging/discriminator.py": (2, "only a number ranks antibodies"),
    "heads/calibration.py": (1, "numbers have no temperature"),
    "models/affinity.py": (6, "embeddings of residues come with where rows end"),
    "models/towers.py": (1, "states of residues are not pooled"),
    "property/predictor.py": (1, "residues are batched by tokens, rows by number"),
    "property/repeats/pooling.py": (3, "what was predicted for residues is a list for each row"),
    "property/dry_run.py": (2, "states of all residues are stored, and each has a label"),
    "training/embedding_cache.py": (2, "stores states of residues, or one embedding of each sequence"),
}


def test_files_that_ask_for_the_kind_of_label_are_few_and_listed():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        num = len(ASKED.findall(path.read_text()))
        if num and not name.startswith("labels/"):
            found[name] = num
    assert found == {name: num for name, (num, _) in ALLOWED.items()}


def test_each_kind_has_its_metrics_its_loss_and_a_choice_of_task():
    assert ROWS.keys() == LOSSES.keys() == {*KINDS}
    tasks = [*dict.fromkeys(kind.task for kind in KINDS)]
    assert [*get_args(TaskChoice)] == ["auto", *tasks]
    for task in tasks:
        assert DataArguments(task=task).task == task
