"""Claims of transformers' own tests of Trainer, each held for Trainer and for FastTrainer.

`benchmarks/upstream_tests.py` runs those tests themselves.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from stock_twins import make_model, make_rows
from tiny_classifier import make_args
from token_rows import pad_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer

MODEL = "BertForSequenceClassification"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
both = pytest.mark.parametrize("cls", [Trainer, FastTrainer])


def make(cls, folder, model=None, callbacks=(), eval_rows=None, **given):
    args_cls = {} if cls is FastTrainer else {"cls": TrainingArguments}
    args = make_args(folder, **args_cls, **{"max_steps": 6, **given})
    rows = make_rows(MODEL, 24)
    eval_dataset = rows if eval_rows is None else eval_rows
    return cls(
        make_model(MODEL) if model is None else model, args, pad_rows, rows, eval_dataset, callbacks=[*callbacks]
    )


def is_of_time(name):
    return name.endswith(("_per_s", "_per_second", "_seconds", "_runtime", "_share", "_gib", "_left", "train_loss"))


def read_state(folder):
    state = json.loads((Path(folder) / "trainer_state.json").read_text())
    state["log_history"] = [{key: log[key] for key in log if not is_of_time(key)} for log in state["log_history"]]
    state.pop("stateful_callbacks")  # of callbacks that only one of them has
    return state


def same_weights(one, other):
    left, right = one.model.state_dict(), other.model.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@both
def test_a_resumed_run_with_frozen_weights_and_accumulation_ends_in_the_same_state_but_for_rates(cls, tmp_path):
    given = {"gradient_accumulation_steps": 2, "save_steps": 3, **EVALUATED}
    runs = [make(cls, tmp_path, **given) for _ in range(2)]
    for trainer in runs:
        trainer.model.bert.embeddings.requires_grad_(False)
    runs[0].train()
    whole = read_state(tmp_path / "checkpoint-6")
    runs[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same_weights(*runs)
    assert read_state(tmp_path / "checkpoint-6") == whole
    assert len(whole["log_history"]) == 9


@both
def test_a_run_with_two_adapters_is_resumed_with_both(cls, tmp_path):
    def adapted():
        config = LoraConfig(r=2, target_modules=["query"], lora_dropout=0.1, modules_to_save=[])
        model = get_peft_model(make_model(MODEL), config, "first")
        model.add_adapter("second", config)
        return model

    whole, resumed = (make(cls, tmp_path, adapted()) for _ in range(2))
    whole.train()
    assert (tmp_path / "checkpoint-2" / "second" / "adapter_model.safetensors").is_file()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_weights(whole, resumed)


@both
def test_the_best_model_is_in_memory_at_the_end(cls, tmp_path):
    given = {"load_best_model_at_end": True, "learning_rate": 1e-1, **EVALUATED}
    trainer = make(cls, tmp_path, **given)
    trainer.train()
    found = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    best = min(found, key=found.get)
    assert best < 6  # at this rate
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in trainer.model.state_dict().items() if name in saved)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found[best])


def test_a_checkpoint_has_the_files_of_trainer_but_its_pickle(tmp_path):
    for cls in (Trainer, FastTrainer):
        make(cls, tmp_path / cls.__name__, max_steps=2).train()
    stock, ours = ({path.name for path in tmp_path.glob(f"{cls}/checkpoint-2/*")} for cls in ("Trainer", "FastTrainer"))
    assert stock - ours == {"training_args.bin"}
    assert ours - stock == {"training_args.json", "manifest.json", "progress.json"}


class Events(TrainerCallback):
    def __init__(self):
        self.names = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.names.append(name)
        return super().__getattribute__(name)


def test_events_come_in_the_order_of_trainer_but_for_the_last_save(tmp_path):
    found = {}
    for cls in (Trainer, FastTrainer):
        recorder = Events()
        make(cls, tmp_path / cls.__name__, callbacks=[recorder], num_train_epochs=2, save_steps=4, **EVALUATED).train()
        found[cls] = recorder.names
    stock, ours = found[Trainer], found[FastTrainer]
    first_save = stock.index("on_save") + 1
    assert ours[:first_save] == stock[:first_save]
    assert sorted(ours) == sorted(stock)
    assert ours[-4:] == ["on_epoch_end", "on_save", "on_log", "on_train_end"]
    assert stock[-4:] == ["on_save", "on_epoch_end", "on_log", "on_train_end"]
    assert stock.count("on_save") == 2


@both
def test_evaluation_sets_are_found_by_name_with_data_workers(cls, tmp_path):
    rows = {"first": make_rows(MODEL, 3), "second": make_rows(MODEL, 5, seed=1)}
    trainer = make(cls, tmp_path, eval_rows=rows, dataloader_num_workers=1)
    for name in (*rows, *rows):
        batches = [*trainer.get_eval_dataloader(name)]
        assert torch.cat([batch["labels"] for batch in batches]).tolist() == rows[name]["labels"]


def test_a_checkpoint_whose_weights_were_split_by_hand_is_read_where_its_hashes_were_deleted(tmp_path):
    whole = make(FastTrainer, tmp_path)
    whole.train()
    folder = tmp_path / "checkpoint-2"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"on purpose\? Without its manifest\.json and progress\.json"):
        make(FastTrainer, tmp_path).train(resume_from_checkpoint=str(folder))
    for name in ("manifest.json", "progress.json"):
        (folder / name).unlink()
    resumed = make(FastTrainer, tmp_path)
    resumed.train(resume_from_checkpoint=str(folder))
    assert same_weights(whole, resumed)
