"""Two real processes share the embedding work: every shard is encoded by one of them, however slow the other reads."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
encoders, folder, barriers = [{bert!r}, {esm!r}], {folder!r}, {barriers!r}
rank = int(os.environ["RANK"])
from accelerate import Accelerator
from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import make_demo_table
from hf_ext.embeddings import encode, store
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

encode.fill_store.__kwdefaults__["shard_sequences"] = 8
read = store.EmbeddingStore.refresh
def read_slowly(self):
    time.sleep(1.0 * rank)  # the second process looks at the folder when the first is well ahead
    read(self)
store.EmbeddingStore.refresh = read_slowly
if not barriers:
    Accelerator.wait_for_everyone = lambda self: None
rows = make_demo_table(num_rows=60).rename_column("pKd", "label")
columns = ["heavy", "light", "antigen"]
settings = AffinityArguments(encoders=encoders, tower_inputs=["heavy,light", "antigen"], head_sizes=[8])
model = build_model(settings, columns)
args = FastTrainingArguments(
    output_dir=folder, embedding_cache_dir=folder + "/cache", speedups=["embedding_cache"], use_cpu=True, max_steps=2,
    report_to="none", save_strategy="no", disable_tqdm=True,
)
trainer = FastTrainer(model, args, build_collator(model, DataArguments(sequence_columns=columns)), rows)
trainer.train()
distinct = len(set(rows["heavy"][:]) | set(rows["light"][:])) + len(set(rows["antigen"][:]))
encoded = trainer.plan["embedding_cache"].evidence["num_encoded"]
open(folder + "/rank" + str(rank), "w").write(str(encoded) + " " + str(distinct))
trainer.end()
"""


def run_two(folder: Path, encoders: tuple[str, str], barriers: bool) -> tuple[int, str]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(
        SCRIPT.format(root=str(ROOT), bert=encoders[0], esm=encoders[1], folder=str(folder), barriers=barriers)
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the workers too
    return process.returncode, errors


@pytest.mark.nightly
def test_two_processes_encode_each_sequence_once_between_them(tmp_path, demo_encoders):
    code, errors = run_two(tmp_path / "run", demo_encoders, barriers=True)
    assert code == 0, errors[-3000:]
    counts = [path.read_text().split() for path in sorted((tmp_path / "run").glob("rank*"))]
    encoded, distinct = [int(count[0]) for count in counts], {int(count[1]) for count in counts}
    assert len(counts) == 2
    assert {sum(encoded)} == distinct
    assert min(encoded) > 0


@pytest.mark.nightly
def test_without_waiting_for_each_other_they_would_leave_sequences_out(tmp_path, demo_encoders):
    code, errors = run_two(tmp_path / "run", demo_encoders, barriers=False)
    assert code != 0
    assert "KeyError" in errors
