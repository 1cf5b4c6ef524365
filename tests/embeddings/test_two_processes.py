"""Two real processes share the embedding work: every shard is encoded by one of them, however slow the other reads."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {root!r})
encoders, folder, barriers = [{bert!r}, {esm!r}], {folder!r}, {barriers!r}
rank = int(os.environ["RANK"])
from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import make_demo_table
from hf_ext.embeddings import encode, store
from hf_ext.trainer import FastTrainer
from hf_ext.processes.team import Team
from hf_ext.training_args import FastTrainingArguments

encode.fill_store.__kwdefaults__["shard_sequences"] = 8
read = store.EmbeddingStore.refresh
def read_slowly(self):
    time.sleep(1.0 * rank)  # the second process looks at the folder when the first is well ahead
    read(self)
store.EmbeddingStore.refresh = read_slowly
if not barriers:
    Team.wait_for_everyone = lambda self: None
rows = make_demo_table(num_rows=60).rename_column("pKd", "label")
columns = ["heavy", "light", "antigen"]
settings = AffinityArguments(encoders=encoders, tower_inputs=["heavy,light", "antigen"], head_sizes=[8])
model = build_model(settings, columns)
args = FastTrainingArguments(
    output_dir=folder, embedding_cache_dir=folder + "/cache", speedups=["embedding_cache"], use_cpu=True, max_steps=2,
    report_to="none", save_strategy="no", disable_tqdm=True,
)
encoded = []  # by this process


class Listing(FastTrainer):
    def encode_sequences(self, name, sequences):
        encoded.extend(name.replace("light", "heavy") + " " + sequence for sequence in sequences)  # of one encoder
        return super().encode_sequences(name, sequences)


trainer = Listing(model, args, build_collator(model, DataArguments(sequence_columns=columns)), rows)
trainer.train()
distinct = {{"heavy " + chain for name in ("heavy", "light") for chain in rows[name]}}
distinct |= {{"antigen " + chain for chain in rows["antigen"]}}
num_encoded = trainer.plan["embedding_cache"].evidence["num_encoded"]
open(folder + "/rank" + str(rank), "w").write(json.dumps([encoded, sorted(distinct), num_encoded]))
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
    reports = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("rank*"))]
    own, distinct = [encoded for encoded, _, _ in reports], reports[0][1]
    assert len(own) == 2
    assert sorted(own[0] + own[1]) == distinct
    assert min(map(len, own)) > 0
    assert [num_encoded for _, _, num_encoded in reports] == [len(distinct)] * 2  # each says what all have encoded


@pytest.mark.nightly
def test_without_waiting_for_each_other_they_would_leave_sequences_out(tmp_path, demo_encoders):
    code, errors = run_two(tmp_path / "run", demo_encoders, barriers=False)
    assert code != 0
    assert "embeddings that other processes stored are not there" in errors
