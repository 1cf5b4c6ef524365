"""Training streams inside FastTrainer: one reader, a position that is saved, and a resume that reads what was left."""

import random
from itertools import islice

import pytest
import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import IntervalStrategy

from hf_ext.errors import ArgumentError, CheckpointError, DataError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

READ: list[int] = []  # ids that sources were asked for


class Line(nn.Module):
    """y = a x."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, x, labels):
        self.seen.append(x.int().tolist())
        return {"loss": ((self.a * x - labels) ** 2).mean(), "x": x}


def generate(shards: list[int]):
    for shard in shards:
        for i in range(4):
            READ.append(4 * shard + i)
            yield {"x": float(4 * shard + i), "labels": 1.0}


def make_stream() -> IterableDataset:
    """20 rows of 5 sources; datasets orders the sources anew in each pass."""
    return IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(5))})


class Numbers(TorchIterableDataset):
    """Rows of a torch stream, in the main process only."""

    def __iter__(self):
        assert torch.utils.data.get_worker_info() is None
        yield from generate([0, 1])


class InEachWorker(TorchIterableDataset):
    """Rows of a torch stream, all of them in every process that reads it."""

    def __iter__(self):
        yield from generate([0, 1])


class WithLength(InEachWorker):
    def __len__(self):
        return 8


class Shared(InEachWorker):
    """Workers share its rows out among themselves, as torch's pages have it."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from islice(generate([0, 1]), worker.id if worker else 0, None, worker.num_workers if worker else 1)


def make_trainer(folder, rows=None, callbacks=(), **given) -> FastTrainer:
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "max_steps": 8,
        **given,
    }
    torch.manual_seed(0)
    args = FastTrainingArguments(output_dir=str(folder), **settings)
    trainer = FastTrainer(Line(), args, train_dataset=make_stream() if rows is None else rows, callbacks=[*callbacks])
    for callback in callbacks:
        callback.trainer = trainer
    return trainer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_resumed_run_reads_what_was_left_and_trains_on_it(tmp_path, num_workers, accumulation):
    saving = {"save_strategy": "steps", "save_steps": 6, "gradient_accumulation_steps": accumulation}
    whole = make_trainer(tmp_path, dataloader_num_workers=num_workers, **saving)
    whole.train()
    num_batches = 6 * accumulation  # of 2 rows: 12 rows, or 36, which is in the second pass
    READ.clear()
    resumed = make_trainer(tmp_path, dataloader_num_workers=num_workers, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.model.seen == whole.model.seen[num_batches:]
    assert len(resumed.model.seen) == 2 * accumulation
    ahead = 2 * (1 + 2 * num_workers)  # rows that loaders fetch beyond the last step
    assert len(READ) <= 2 * 2 * accumulation + ahead + 4  # and those of the source it stands in


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_streams_are_read_by_the_process_and_repeat(tmp_path, num_workers):
    trainer = make_trainer(tmp_path, Numbers(), dataloader_num_workers=num_workers, max_steps=6)
    trainer.train()
    assert trainer.model.seen == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]


def test_with_workers_evaluation_sees_each_row_of_a_torch_stream_once_and_in_order(tmp_path):
    seen: list[list[float]] = []
    settings = {"dataloader_num_workers": 2, "eval_steps": 2, "max_steps": 2, "per_device_eval_batch_size": 3}
    trainer = make_trainer(tmp_path, **settings)
    trainer.compute_metrics = lambda found: seen.append(found.predictions.tolist()) or {}
    trainer.eval_dataset, trainer.args.eval_strategy = InEachWorker(), IntervalStrategy.STEPS
    trainer.train()
    for stream in (InEachWorker(), WithLength(), Shared()):
        trainer.evaluate(stream)
        assert len(trainer.predict(stream).label_ids) == 8
    assert seen == [[float(i) for i in range(8)]] * 7
    trainer.evaluate(make_stream())  # whose sources workers would read in turns
    assert seen[-1] == [float(i) for i in range(20)]
    trainer.end()


def test_rows_that_a_map_changes_at_random_are_refused_with_the_argument_that_goes_on(tmp_path):
    stream = make_stream().shuffle(seed=0, buffer_size=5).map(lambda row: {**row, "labels": random.gauss(0, 1)})
    make_trainer(tmp_path, stream, save_strategy="steps", save_steps=12, max_steps=14).train()  # in the second pass
    folder = str(tmp_path / "checkpoint-12")
    with pytest.raises(CheckpointError, match=r"a `map` changes rows at random.*--allow_changed data") as refusal:
        make_trainer(tmp_path, stream, max_steps=14).train(resume_from_checkpoint=folder)
    assert "Row 4 of pass 1" in str(refusal.value)
    goes_on = make_trainer(tmp_path, stream, max_steps=14, allow_changed=["data"])
    goes_on.train(resume_from_checkpoint=folder)
    assert (goes_on.state.global_step, len(goes_on.model.seen)) == (14, 2)


def test_what_cannot_be_is_refused_and_what_is_surprising_is_said(tmp_path, caplog):
    for setting in ("split_batches", "dispatch_batches"):
        with pytest.raises(ArgumentError, match="with a stream split_batches too"):
            make_trainer(tmp_path, accelerator_config={setting: True}).train()
    with pytest.raises(ArgumentError, match="split_dataset_by_node"):
        make_trainer(tmp_path, split_dataset_by_node(make_stream(), 0, 2)).train()
    with pytest.raises(DataError, match="no rows in pass 0"):
        make_trainer(tmp_path, make_stream().filter(lambda row: False)).train()
    make_trainer(tmp_path, logging_strategy="epoch", max_steps=1).train()
    assert "A training stream is one epoch" in caplog.text


def test_a_stream_without_training_rows_is_refused(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    args = FastTrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none")
    trainer = FastTrainer(model, args, collator, demo_rows.to_iterable_dataset().take(0))
    with pytest.raises(DataError, match="The stream has no training rows"):
        trainer.train()
