"""Throughput: numbers worked out by hand on a fake clock, and the same counts from stock Trainer and FastTrainer."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from tiny_generators import make_batch, make_generator
from transformers import (
    DataCollatorForLanguageModeling,
    EsmForMaskedLM,
    EsmTokenizer,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from hf_ext.data import PairEncoder
from hf_ext.hardware import describe_hardware
from hf_ext.reporting import ThroughputCallback
from hf_ext.reporting.batch_counts import BatchCounter
from hf_ext.reporting.throughput import Device
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals

# <cls> A C D <eos> and <cls> A <eos> <pad> <pad>: 4 residues, 8 tokens, 10 positions, 2 sequences.
IDS = torch.tensor([[0, 5, 23, 13, 2], [0, 5, 2, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
# Weights: 4 x 16 x 16 + 2 x 16 x 32 per layer, head 16 x 16 + 16 x 33, contacts 2.
PER_TOKEN, PER_PAIR = 6 * (2048 + 256 + 528 + 2), 12 * 16


@pytest.fixture(scope="module")
def tokenizer(demo_encoders) -> EsmTokenizer:
    return EsmTokenizer.from_pretrained(demo_encoders[1])


class Loop:
    """A training loop on a fake clock, which calls the callback as Trainer does."""

    def __init__(self, folder: Path, tokenizer: EsmTokenizer | None, warmup: int = 0) -> None:
        self.now = 100.0
        self.model = make_esm(EsmForMaskedLM).train()
        self.callback = ThroughputCallback(self.model, tokenizer, warmup, clock=lambda: self.now)
        self.args = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        self.state = TrainerState(max_steps=10, is_world_process_zero=True)
        self.tell("train_begin")

    def tell(self, event: str, **kwargs: object) -> None:
        getattr(self.callback, f"on_{event}")(self.args, self.state, None, model=None, **kwargs)

    def step(self, wait: float, compute: float) -> None:
        self.now += wait
        self.tell("step_begin")
        self.model(input_ids=IDS, attention_mask=MASK)
        self.now += compute
        self.state.global_step += 1
        self.tell("step_end")

    def log(self, **logs: float) -> dict:
        self.state.log_history.append(dict(logs))
        self.tell("log", logs=logs)
        assert self.state.log_history[-1] == logs
        return logs

    def finish(self) -> dict:
        self.log(train_loss=1.0)
        self.tell("train_end")
        return json.loads((Path(self.args.output_dir) / "throughput.json").read_text())


def test_rates_are_those_of_the_hand_computed_window(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=1)
    loop.step(wait=5, compute=25)
    assert set(loop.log(loss=1.0)) == {"loss", "peak_memory_gib"}  # nothing but the warm-up yet
    loop.step(wait=0.5, compute=1.5)
    loop.step(wait=0.5, compute=1.5)
    logs = loop.log(loss=3.0)
    assert logs.pop("peak_memory_gib") > 0
    # Two steps of 2 s: 2 x 4 residues, 2 x 10 positions, 2 x 2 sequences; 7 more steps of 2 s.
    assert logs == {
        "loss": 3.0,
        "residues_per_s": 2.0,
        "padded_tokens_per_s": 5.0,
        "sequences_per_s": 1.0,
        "padding_share": 0.2,
        "data_wait_share": 0.25,
        "hours_left": pytest.approx(7 * 2 / 3600, rel=1e-4),
    }
    loop.step(0, 4)
    live = loop.callback.live(loop.args, loop.state)
    assert (live["batches_per_s"], live["residues_per_s"]) == (0.25, 1.0)  # looking changes nothing
    assert loop.log(loss=1.0)["residues_per_s"] == 1.0  # of the steps since the last log
    final = loop.log(train_loss=2.0)
    assert (final["train_residues_per_s"], final["train_warmup_seconds"], "hours_left" in final) == (1.5, 30.0, False)
    result = loop.finish()
    assert (result["warmup_steps"], result["measured_steps"], result["totals"]["seconds"]) == (1, 3, 8.0)


def test_evaluation_saving_and_logging_are_in_no_rate(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer)
    loop.step(1, 1)
    loop.now += 50
    loop.log(loss=1.0)
    loop.now += 100
    loop.model.eval()
    loop.model(input_ids=IDS, attention_mask=MASK)
    loop.model.train()
    loop.log(eval_loss=1.0)
    loop.tell("evaluate", metrics={})
    loop.now += 200
    loop.tell("save")
    loop.step(1, 1)
    # 354 s of the clock for two steps; 8 more of them.
    assert loop.log(loss=1.0)["hours_left"] == pytest.approx(8 * (354 / 2) / 3600, rel=1e-3)
    totals = loop.finish()["totals"]
    assert (totals["seconds"], totals["data_wait_seconds"], totals["sequences"]) == (4.0, 2.0, 4.0)


def test_two_processes_are_added_up_and_their_times_averaged(tmp_path, tokenizer, monkeypatch) -> None:
    # What gathering returns for a second process that took 3 s over the same batch.
    def gather(rows: torch.Tensor) -> torch.Tensor:
        other = rows.clone()
        other[:, 1] = 3.0
        return torch.cat([rows, other])

    monkeypatch.setattr("hf_ext.reporting.throughput.gather", gather)
    loop = Loop(tmp_path, tokenizer)
    loop.args = SimpleNamespace(device=loop.args.device, output_dir=loop.args.output_dir, world_size=2)
    loop.step(0, 1)
    assert loop.log(loss=1.0)["residues_per_s"] == (4 + 4) / 2.0


def test_mfu_is_flops_over_the_peak_of_all_devices_where_that_is_known(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer)
    loop.step(0, 1)
    assert "mfu" not in loop.log(loss=1.0)
    loop.callback.device = Device(describe_hardware("T4"), "fp16", num_processes=2)
    loop.step(0, 1e-9)
    assert loop.log(loss=1.0)["mfu"] == pytest.approx((PER_TOKEN * 8 + PER_PAIR * 34) / 1e-9 / (2 * 65e12), rel=1e-3)
    loop.callback.device = Device(describe_hardware("cpu"), "fp32", 1)
    assert "no published fp32 peak for cpu" in loop.finish()["no_mfu_because"]


def count(model, tokenizer=None, **batch) -> tuple[list[float], BatchCounter]:
    """Residues, tokens, positions, FLOPs and sequences of a batch."""
    counter = BatchCounter(model.train(), tokenizer)
    model(**batch)
    counter.detach()
    model(**batch)
    return counter.take().tolist(), counter


def test_padding_and_framing_tokens_are_no_residues(tokenizer) -> None:
    model, flops = make_esm(EsmForMaskedLM), PER_TOKEN * 8 + PER_PAIR * (25 + 9)
    assert count(model, tokenizer, input_ids=IDS, attention_mask=MASK)[0] == [4, 8, 10, flops, 2]
    assert count(model, tokenizer, input_ids=IDS)[0] == [4, 8, 10, flops, 2]  # padding is told by its token
    words = SimpleNamespace(get_vocab=lambda: {"[PAD]": 0, "red": 2}, cls_token_id=1, pad_token_id=1)
    for unknown in (None, words):  # of other texts tokens are counted
        counts, counter = count(model, unknown, input_ids=IDS, attention_mask=MASK)
        assert (counter.unit, counts[1:]) == ("tokens", [8, 10, flops, 2])


def test_packed_rows_count_their_sequences(tokenizer) -> None:
    ids, positions = torch.tensor([[0, 5, 2, 0, 5, 23, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    counts, _ = count(make_esm(EsmForMaskedLM), tokenizer, input_ids=ids, position_ids=positions)
    assert counts == [3, 7, 7, PER_TOKEN * 7 + PER_PAIR * (9 + 16), 2]


def test_affinity_models_count_the_residues_of_all_towers_and_rows_alone_where_they_are_cached(
    make_affinity, demo_rows
) -> None:
    model, collator = make_affinity("full", "full")
    rows = [demo_rows[i] for i in range(4)]
    (residues, tokens, padded, flops, sequences), counter = count(model, **collator(rows))
    assert residues == sum(len(row[name]) for row in rows for name in ("heavy", "light", "antigen"))
    assert padded >= tokens == residues + 2 * 3 * 4  # two framing tokens per tower input
    assert (counter.unit, flops > 0, sequences) == ("residues", True, 4)
    model, _ = make_affinity()
    cached = {name: torch.zeros(3, 64) for name in model.embedding_sizes}
    counts, counter = count(model, embeddings=cached, labels=torch.zeros(3))
    assert (counter.unit, counts) == ("sequences", [0, 0, 0, 0, 3])


def test_what_a_generator_writes_counts_beside_what_it_reads() -> None:
    counts, _ = count(make_generator(), PairEncoder().tokenizer, **make_batch())
    # Read: 18 + 3 + 7 residues of three distinct antigens, two framing tokens each, padded to 20. Written: 9 + 5, 3,
    # 5 + 2 and 2 + 8 residues, with an end each and a separator in three; padded to 9 + 1 + 5 + 1.
    residues, tokens, padded = (18 + 3 + 7) + (14 + 3 + 7 + 10), (28 + 6) + (34 + 4 + 3), 3 * 20 + 4 * 16
    assert [*counts[:3], counts[4]] == [residues, tokens, padded, 4]


def run_trainer(cls, args_cls, folder: Path, tokenizer: EsmTokenizer, **settings: object) -> tuple[Trainer, dict]:
    sequences = ["ACDEFGHIKL"[: 2 + i % 7] for i in range(24)]
    rows = Dataset.from_dict(dict(tokenizer(sequences)))
    common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
    asked = {"preset": "baseline"} if cls is FastTrainer else {}  # else a FastTrainer leaves no file
    args = args_cls(str(folder), per_device_train_batch_size=4, num_train_epochs=1, **{**common, **asked, **settings})
    model = make_esm(EsmForMaskedLM)
    callbacks = [] if cls is FastTrainer else [ThroughputCallback(model, tokenizer)]
    collator = DataCollatorForLanguageModeling(tokenizer)
    trainer = cls(model, args, data_collator=collator, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    trainer.final = trainer.train().metrics
    return trainer, json.loads((folder / "throughput.json").read_text())


def test_stock_trainer_with_the_callback_counts_and_logs_what_fast_trainer_does(tmp_path, tokenizer) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    stock, counted = run_trainer(Trainer, TrainingArguments, tmp_path / "stock", tokenizer, **settings)
    fast, same = run_trainer(FastTrainer, FastTrainingArguments, tmp_path / "fast", tokenizer, **settings)
    _, other = run_trainer(Trainer, TrainingArguments, tmp_path / "other", tokenizer, seed=7)
    names = ("residues", "tokens", "padded_tokens", "sequences", "flops")
    assert [counted["totals"][name] for name in names] == [same["totals"][name] for name in names]
    assert counted["totals"]["residues"] != other["totals"]["residues"]
    assert counted["totals"]["sequences"] == 3 * 4  # 6 steps of 4, 3 of them warm-up; evaluation does not count
    last = [[log for log in trainer.state.log_history if "loss" in log][-1] for trainer in (stock, fast)]
    assert set(last[0]) == set(last[1]) >= {"loss", "learning_rate", "epoch", "step", "residues_per_s", "hours_left"}
    assert last[0]["loss"] == last[1]["loss"]
    assert min(trainer.final["train_residues_per_s"] for trainer in (stock, fast)) > 0
    assert not any("residues" in name for log in fast.state.log_history if "eval_loss" in log for name in log)


def test_accumulated_batches_belong_to_one_step(tmp_path, tokenizer) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 6}
    _, result = run_trainer(FastTrainer, FastTrainingArguments, tmp_path, tokenizer, **settings)
    assert (result["measured_steps"], result["totals"]["sequences"]) == (3, 24)
