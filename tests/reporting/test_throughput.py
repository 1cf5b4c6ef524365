"""Throughput: numbers worked out by hand on a fake clock, and the same counts from stock Trainer and FastTrainer."""

from __future__ import annotations

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

from hf_ext.data.antibodies import PairEncoder
from hf_ext.hardware import describe_hardware
from hf_ext.reporting.batch_counts import BatchCounter
from hf_ext.reporting.rates import Device, mean_rates
from hf_ext.reporting.throughput import ThroughputCallback
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

# <cls> A C D <eos> and <cls> A <eos> <pad> <pad>: 4 residues, 8 tokens, 10 positions, 2 sequences.
IDS = torch.tensor([[0, 5, 23, 13, 2], [0, 5, 2, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def tokenizer(demo_encoders) -> EsmTokenizer:
    return EsmTokenizer.from_pretrained(demo_encoders[1])


class Loop:
    """A training loop on a fake clock, which calls the callback as Trainer does."""

    def __init__(self, folder: Path, tokenizer: EsmTokenizer | None, warmup: int = 1, **settings: object) -> None:
        self.now = 100.0
        self.model = make_esm(EsmForMaskedLM).train()
        self.callback = ThroughputCallback(self.model, tokenizer, warmup, clock=lambda: self.now)
        self.args = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        for name, value in settings.items():
            setattr(self.args, name, value)
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
    loop = Loop(tmp_path, tokenizer)
    loop.step(wait=5, compute=25)  # warm-up
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


def test_each_log_holds_the_steps_since_the_last_one(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
    loop.step(0, 1)
    assert loop.log(loss=1.0)["residues_per_s"] == 4.0
    loop.step(0, 4)
    assert loop.log(loss=1.0)["residues_per_s"] == 1.0
    assert loop.finish()["rates"]["residues_per_s"] == pytest.approx(8 / 5)


def test_evaluation_saving_and_logging_are_in_no_rate(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
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
    result = loop.finish()
    assert result["totals"]["seconds"] == 4.0
    assert result["totals"]["data_wait_seconds"] == 2.0
    assert result["totals"]["sequences"] == 4.0  # the evaluated batch is not among them
    assert result["rates"]["residues_per_s"] == 2.0


def test_hours_left_count_evaluation_as_it_was_so_far(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=1)
    loop.step(0, 1000)
    loop.step(0, 3)
    loop.now += 7
    loop.tell("evaluate", metrics={})
    assert loop.log(loss=1.0)["hours_left"] == pytest.approx(8 * 10 / 3600, rel=1e-4)


def test_warmup_seconds_stand_apart(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=2)
    for seconds in (30, 20, 1, 2, 3):
        loop.step(0, seconds)
    result = loop.finish()
    assert (result["warmup_steps"], result["warmup_seconds"], result["measured_steps"]) == (2, 50.0, 3)
    assert result["step_seconds"] == {"q1": 1.5, "median": 2.0, "q3": 2.5}
    assert result["steps"]["seconds"] == [1.0, 2.0, 3.0]


def test_warmup_steps_given_to_the_callback_win(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=2)
    loop.callback.warmup_steps = 0
    loop.tell("train_begin")
    loop.step(0, 1)
    assert loop.finish()["measured_steps"] == 1


def test_the_final_metrics_are_those_of_the_whole_run(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
    loop.step(0, 1)
    loop.step(0, 3)
    logs = loop.log(train_loss=2.0)
    assert logs["train_residues_per_s"] == 2.0
    assert logs["train_warmup_seconds"] == 0.0
    assert "hours_left" not in logs


def test_a_run_shorter_than_its_warmup_has_no_rates(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=3)
    loop.step(0, 1)
    assert set(loop.log(loss=1.0)) == {"loss", "peak_memory_gib"}
    result = loop.finish()
    assert (result["measured_steps"], result["rates"], result["step_seconds"]["median"]) == (0, {}, None)


def test_without_a_tokenizer_the_unit_is_tokens_and_says_so(tmp_path) -> None:
    loop = Loop(tmp_path, None, warmup=0)
    loop.step(0, 1)
    logs = loop.log(loss=1.0)
    assert logs["tokens_per_s"] == 8.0
    assert "residues_per_s" not in logs
    assert loop.finish()["unit"] == "tokens"


# --- counting at the model's door -------------------------------------------------------------------------------------


def count(tokenizer: EsmTokenizer | None, **batch: torch.Tensor) -> list[float]:
    model = make_esm(EsmForMaskedLM).train()
    counter = BatchCounter(model, tokenizer)
    model(**batch)
    counter.detach()
    model(**batch)
    residues, tokens, padded, _, sequences = counter.take().tolist()
    return [residues, tokens, padded, sequences]


def test_padding_and_framing_tokens_are_no_residues(tokenizer) -> None:
    assert count(tokenizer, input_ids=IDS, attention_mask=MASK) == [4, 8, 10, 2]


def test_without_a_mask_padding_is_told_by_its_token(tokenizer) -> None:
    assert count(tokenizer, input_ids=IDS) == [4, 8, 10, 2]
    assert count(None, input_ids=IDS)[1:] == [8, 10, 2]


def test_residues_under_masks_and_random_tokens_count(tokenizer) -> None:
    # Masked language modelling put <mask> on the first residue and, at random, <eos> on the second.
    ids, labels = IDS.clone(), torch.full_like(IDS, -100)
    ids[0, 1], labels[0, 1] = 32, 5
    ids[0, 2], labels[0, 2] = 2, 23
    assert count(tokenizer, input_ids=ids, attention_mask=MASK, labels=labels) == [4, 8, 10, 2]


def test_labels_that_the_model_does_not_see_are_used_once(tokenizer) -> None:
    ids, labels = IDS.clone(), torch.full_like(IDS, -100)
    ids[0, 2], labels[0, 2] = 2, 23
    model = make_esm(EsmForMaskedLM).train()
    counter = BatchCounter(model, tokenizer)
    for expected in (4, 3):  # the second batch has no labels: its random <eos> cannot be told
        if expected == 4:
            counter.labels = labels
        model(input_ids=ids, attention_mask=MASK)
        assert counter.take()[0].item() == expected


def test_flops_of_unequal_lengths_are_exact() -> None:
    model = make_esm(EsmForMaskedLM).train()
    counter = BatchCounter(model)
    model(input_ids=IDS, attention_mask=MASK)
    # Weights: 4 x 16 x 16 + 2 x 16 x 32 per layer, head 16 x 16 + 16 x 33, contacts 2; 5 x 5 + 3 x 3 pairs.
    assert counter.take()[3].item() == 6 * (2048 + 256 + 528 + 2) * 8 + 12 * 16 * 34


def test_affinity_models_count_the_residues_of_all_towers(make_affinity, demo_rows) -> None:
    model, collator = make_affinity("full", "full")
    rows = [demo_rows[i] for i in range(4)]
    counter = BatchCounter(model.train())
    model(**collator(rows))
    residues, tokens, padded, flops, sequences = counter.take().tolist()
    assert residues == sum(len(row[name]) for row in rows for name in ("heavy", "light", "antigen"))
    assert sequences == 4
    assert padded >= tokens == residues + 2 * 3 * 4  # two framing tokens per tower input
    assert (counter.unit, flops > 0) == ("residues", True)


def test_what_a_generator_writes_counts_beside_what_it_reads() -> None:
    model = make_generator().train()
    counter = BatchCounter(model, PairEncoder().tokenizer)
    batch = make_batch()
    model(**batch)
    # Read: 18 + 3 + 7 residues of three distinct antigens, two framing tokens each, padded to 20. Written: 9 + 5, 3,
    # 5 + 2 and 2 + 8 residues, with an end each and a separator in three; padded to 9 + 1 + 5 + 1.
    residues, tokens, padded = (18 + 3 + 7) + (14 + 3 + 7 + 10), (28 + 6) + (34 + 4 + 3), 3 * 20 + 4 * 16
    assert counter.take()[[0, 1, 2, 4]].tolist() == [residues, tokens, padded, 4]


def test_cached_embeddings_count_rows_only(make_affinity) -> None:
    model, _ = make_affinity()
    counter = BatchCounter(model.train())
    model(embeddings={name: torch.zeros(3, 64) for name in model.embedding_sizes}, labels=torch.zeros(3))
    assert counter.take().tolist() == [0, 0, 0, 0, 3]
    assert counter.unit == "sequences"
    sums = {"seconds": 2, "data_wait_seconds": 0, "sequences": 3, "residues": 0, "tokens": 0, "padded_tokens": 0}
    assert mean_rates(sums, counter.unit) == {"sequences_per_s": 1.5, "data_wait_share": 0.0}


def test_packed_rows_count_their_sequences(tokenizer) -> None:
    ids, positions = torch.tensor([[0, 5, 2, 0, 5, 23, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    model = make_esm(EsmForMaskedLM).train()
    counter = BatchCounter(model, tokenizer)
    model(input_ids=ids, position_ids=positions)
    residues, tokens, padded, flops, sequences = counter.take().tolist()
    assert [residues, tokens, padded, sequences] == [3, 7, 7, 2]
    assert flops == 6 * (2048 + 256 + 528 + 2) * 7 + 12 * 16 * (9 + 16)


# --- MFU and the baseline ---------------------------------------------------------------------------------------------


def test_mfu_is_left_out_where_the_peak_is_not_known(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
    loop.step(0, 1)
    assert "mfu" not in loop.log(loss=1.0)
    assert "no published fp32 peak for cpu" in loop.finish()["no_mfu_because"]


def test_mfu_is_flops_over_the_peak_of_all_devices(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
    loop.callback._device = Device(describe_hardware("T4"), "fp16", num_processes=2)
    loop.step(0, 1e-9)
    flops = 6 * (2048 + 256 + 528 + 2) * 8 + 12 * 16 * 34
    assert loop.log(loss=1.0)["mfu"] == pytest.approx(flops / 1e-9 / (2 * 65e12), rel=1e-3)
    assert Device(describe_hardware("T4"), "bf16", 1).why_no_mfu("") == "no published bf16 peak for T4"


# --- real Trainers ----------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def both(tmp_path_factory, tokenizer) -> tuple[tuple[Trainer, dict], tuple[Trainer, dict]]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    stock = run_trainer(Trainer, TrainingArguments, folder / "stock", tokenizer, **settings)
    fast = run_trainer(FastTrainer, FastTrainingArguments, folder / "fast", tokenizer, **settings)
    return stock, fast


COUNTED = ("residues", "tokens", "padded_tokens", "sequences", "flops")


def test_stock_trainer_with_the_callback_counts_what_fast_trainer_counts(both) -> None:
    (_, stock), (_, fast) = both
    assert {name: stock["totals"][name] for name in COUNTED} == {name: fast["totals"][name] for name in COUNTED}
    assert stock["totals"]["sequences"] == 3 * 4  # 6 steps of 4, 3 of them warm-up; evaluation does not count
    assert stock["totals"]["tokens"] == stock["totals"]["residues"] + 2 * 12
    assert stock["steps"]["residues"] == fast["steps"]["residues"]


def test_the_comparison_of_counts_can_fail(both, tmp_path, tokenizer) -> None:
    (_, stock), _ = both
    _, other = run_trainer(Trainer, TrainingArguments, tmp_path, tokenizer, seed=7)
    assert stock["steps"]["residues"] != other["steps"]["residues"]


def test_both_trainers_log_the_same_names_and_lose_nothing_of_trainers_own(both) -> None:
    (stock, _), (fast, _) = both
    last = [[log for log in trainer.state.log_history if "loss" in log][-1] for trainer in (stock, fast)]
    assert set(last[0]) == set(last[1]) >= {"loss", "learning_rate", "epoch", "step", "residues_per_s", "hours_left"}
    assert [log["loss"] for log in last] == [last[0]["loss"]] * 2
    for trainer in (stock, fast):
        assert trainer.final["train_residues_per_s"] > 0
        evaluated = next(log for log in trainer.state.log_history if "eval_loss" in log)
        assert not any(name.endswith("residues_per_s") for name in evaluated)


def test_accumulated_batches_belong_to_one_step(tmp_path, tokenizer) -> None:
    _, result = run_trainer(
        FastTrainer,
        FastTrainingArguments,
        tmp_path,
        tokenizer,
        gradient_accumulation_steps=2,
        max_steps=6,
    )
    assert result["steps"]["sequences"] == [8.0, 8.0, 8.0]


def test_two_processes_are_added_up_and_their_times_averaged(tmp_path, tokenizer, monkeypatch) -> None:
    # What gathering returns for a second process that took 3 s over the same batch.
    def gather(rows: torch.Tensor) -> torch.Tensor:
        other = rows.clone()
        if rows.dim() == 2:
            other[:, 0] = 3.0
        return torch.cat([rows, other])

    monkeypatch.setattr("hf_ext.reporting.throughput.gather", gather)
    loop = Loop(tmp_path, tokenizer, warmup=0)
    args = SimpleNamespace(**{name: getattr(loop.args, name) for name in ("device", "output_dir")}, world_size=2)
    loop.args = args
    loop.step(0, 1)
    assert loop.log(loss=1.0)["residues_per_s"] == (4 + 4) / 2.0


def test_texts_are_counted_in_tokens_and_proteins_in_residues(tokenizer) -> None:
    words = SimpleNamespace(get_vocab=lambda: {"[PAD]": 0, "[CLS]": 1, "red": 2}, cls_token_id=1, pad_token_id=0)
    units = []
    for known in (tokenizer, words):
        model = make_esm(EsmForMaskedLM).train()
        counter = BatchCounter(model, known)
        model(input_ids=IDS, attention_mask=MASK)
        units.append((counter.unit, int(counter.take()[1])))
    assert units == [("residues", 8), ("tokens", 8)]


def test_a_step_that_is_left_out_is_in_no_rate_and_not_waited_for(tmp_path, tokenizer) -> None:
    loop = Loop(tmp_path, tokenizer, warmup=0)
    callback = loop.callback
    callback.on_train_begin(loop.args, loop.state, None, model=loop.model)
    for seconds, is_left_out in ((1.0, False), (50.0, True), (3.0, False)):
        if is_left_out:
            callback.leave_out_step()
        callback.on_step_begin(loop.args, loop.state, None)
        loop.model(input_ids=IDS, attention_mask=MASK)
        loop.now += seconds
        callback.on_step_end(loop.args, loop.state, None)
    callback.extend_logs({"loss": 1.0}, loop.args, loop.state)
    found = callback.summarize([])
    assert (found["measured_steps"], found["totals"]["seconds"], found["totals"]["residues"]) == (2, 4.0, 8.0)
