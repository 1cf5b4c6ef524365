"""A student learns from its teacher: the loss, the rows, what the report says of both, and what is refused."""

import json
import os

import commands
import numpy as np
import pandas as pd
import pytest
import torch
from closeness import distance
from labelled_rows import LETTERS, add_teacher, make_labelled, make_rows, make_trainer
from run_outcomes import KillAt, Killed
from torch.nn import functional
from transformers import TrainerCallback

from hf_ext.doctor import examine
from hf_ext.errors import ArgumentError, CheckpointError
from hf_ext.property import TASK, AffinityPredictor

QUICK = (
    "--num_train_epochs 4 --learning_rate 0.01 --per_device_train_batch_size 16 --head_sizes 16 --head_dropout 0.1 "
    "--save_strategy epoch --disable_tqdm true --use_cpu true --speedups embedding_cache --preset none "
    "--split_sizes 0.5 0.2 0.3"
)


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step as one vector."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.last = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_by_hand(model, batch, weight, heat=2.0, factor=4.0):
    """What the loss should be, from logits alone; `factor` is heat squared."""
    given = {name: batch[name] for name in batch.keys() - {"labels", "teacher"}}
    logits, labels, teacher = model(**given).logits, batch["labels"], batch["teacher"]
    if labels.is_floating_point():
        std = torch.tensor(model.config.label_std)
        far = ((logits - teacher) / std) ** 2
        wrong = torch.where(labels == -100, 0.0, (logits - labels) / std) ** 2
    else:
        p = torch.exp(teacher / heat) / torch.exp(teacher / heat).sum(1, keepdim=True)
        q = torch.exp(logits / heat) / torch.exp(logits / heat).sum(1, keepdim=True)
        far = factor * (p * (p.log() - q.log())).sum(1)
        wrong = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (weight * far + (1 - weight) * wrong).sum() / labels.numel()


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_a_step_of_several_batches_has_the_loss_and_gradient_worked_out_by_hand(name, demo_encoders, tmp_path):
    steps = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 6, "taught": True}
    trainer = make_trainer(name, tmp_path, demo_encoders[1], learning_rate=0.0, **steps)
    trainer.add_callback(found := Gradients())
    trainer.train()
    model, collator = trainer.model, make_labelled(name, demo_encoders[1])[1]
    batch = collator([*add_teacher(make_rows(name))])
    assert (batch["labels"] == -100).any()

    def twin(*given):
        model.zero_grad()
        loss = loss_by_hand(model, batch, *given)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), loss.item()

    gradient, loss = twin(0.5)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-6)
    assert distance(found.last, gradient) < 1e-6
    assert distance(found.last, twin(0.4)[0]) > 1e-3
    if name == "classes":
        assert distance(found.last, twin(0.5, 2.0, 1.0)[0]) > 1e-3  # without the factor of temperature


def test_of_one_number_it_is_the_loss_of_a_mixed_label_and_the_teachers_part_where_none_is_known(make_affinity):
    model, _ = make_affinity()
    model.eval().config.update({"label_mean": 3.0, "label_std": 2.0, "distill_weight": 0.25})
    rows = {name: torch.randn(3, width) for name, width in model.embedding_sizes.items()}

    def gradient(labels, chosen=(0, 1, 2), **given):
        model.zero_grad()
        some = {name: values[[*chosen]] for name, values in rows.items()}
        model(embeddings=some, labels=torch.tensor(labels), num_items_in_batch=3, **given).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.head.parameters() if p.grad is not None])

    teacher = torch.tensor([1.0, 2.0, 3.0])
    mixed = gradient([4.0, -100.0, 3.0], teacher=teacher)  # -100 is a number here
    assert distance(mixed, gradient([0.75 * 4 + 0.25 * 1, 0.75 * -100 + 0.25 * 2, 3.0])) < 1e-6
    unknown = gradient([4.0, float("nan"), 3.0], teacher=teacher)
    assert distance(unknown, gradient([3.25, 3.0], (0, 2)) + 0.25 * gradient([2.0], (1,))) < 1e-6
    assert distance(unknown, gradient([3.25, 2.0, 3.0])) > 1e-3


def make_table(path, num, seed, is_classes=False):
    generator = np.random.default_rng(seed)
    numbers = [generator.integers(0, 20, 8 + i % 8) for i in range(num)]
    label = [np.mean(one) - 9.5 for one in numbers]
    if is_classes:
        label = [("low", "middle", "high")[i] for i in np.digitize(label, [-0.7, 0.7])]
    table = pd.DataFrame({"sequence": ["".join(LETTERS[i] for i in one) for one in numbers], "label": label})
    table.to_csv(path, index=False)
    return table


@pytest.fixture(scope="module")
def bench(tmp_path_factory, demo_encoders):
    """A folder, and a function that gives the words of a run there; with a teacher, which is trained once."""
    folder = tmp_path_factory.mktemp("distilling")

    def words(name, kind="numbers", taught_by=None, **given):
        if taught_by:
            teacher = folder / f"{taught_by}_teacher"
            if not teacher.exists():
                TASK.main(words(teacher.name, taught_by))
                further = [make_table(folder / "further.csv", 50, 1), pd.read_csv(teacher / "predictions.csv")[:10]]
                pd.concat(further)[["sequence"]].to_csv(folder / "further.csv", index=False)  # and ten test rows
            given |= {"distill_from": teacher}
        if not (table := folder / f"{kind}.csv").exists():
            make_table(table, 120, 0, kind == "classes")
        flags = {"dataset_name": table, "output_dir": folder / name, "encoders": demo_encoders[1]}
        flags |= {"embedding_cache_dir": folder / "cache", **given}
        return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))] + QUICK.split()

    return folder, words


@pytest.mark.parametrize("kind", ["numbers", pytest.param("classes", marks=pytest.mark.nightly)])
def test_a_student_is_scored_beside_its_teacher_and_copies_among_its_rows_are_told(bench, kind):
    folder, words = bench
    results = TASK.main(words(f"{kind}_student", kind, kind, unlabelled=folder / "further.csv"))
    teacher = json.loads((folder / f"{kind}_teacher" / "all_results.json").read_text())
    metric = {"numbers": "rmse", "classes": "log_loss"}[kind]
    scores = results["test"]["scores"]
    assert scores["teacher"][metric]["value"] == pytest.approx(
        teacher["test"]["scores"]["model"][metric]["value"], rel=1e-4
    )
    assert scores["model"][metric]["value"] != pytest.approx(scores["teacher"][metric]["value"], rel=1e-3)
    predicted = [
        pd.read_csv(folder / f"{kind}_{who}" / "predictions.csv")["prediction"] for who in ("teacher", "student")
    ]
    same = np.mean(predicted[0] == predicted[1]) if kind == "classes" else np.corrcoef(*predicted)[0, 1]
    agreement = results["distillation"]["student"]["accuracy" if kind == "classes" else "pearson"]
    assert agreement["value"] == pytest.approx(same, rel=1e-4)
    assert agreement["low"] < agreement["value"] < agreement["high"]
    assert results["data"]["leaks"]["row"]["num_test_rows_in_train"] == 10
    assert "10 of 36 test rows" in results["verdict"]["text"]
    assert results["data"]["sizes"]["train"] == 60
    for page in ("run.log", "report.html"):
        assert "The student agrees with its teacher" in (folder / f"{kind}_student" / page).read_text()
    assert "60 rows of" in (folder / f"{kind}_student" / "run.log").read_text()


@pytest.mark.nightly
def test_a_killed_student_goes_on_with_what_its_teacher_said_to_the_same_bytes(bench, monkeypatch):
    folder, words = bench
    given = {"taught_by": "numbers", "unlabelled": folder / "further.csv"}
    TASK.main(words("whole", **given))
    with TASK.parse(words("killed", **given)) as run:
        data = TASK.load(run)
        parts = TASK.build(run, data)
        assert {"teacher"} == {*parts["train_dataset"].column_names} - {*parts["eval_dataset"].column_names}
        assert len(parts["train_dataset"]) == 60 + 60
        trainer = run.build_trainer(**parts)
        trainer.add_callback(KillAt(10))
        with pytest.raises(Killed):
            TASK.train(run, trainer, data)
        trainer.end()
    asked = []
    logits = AffinityPredictor.logits
    monkeypatch.setattr(AffinityPredictor, "logits", lambda self, rows: asked.append(len(rows)) or logits(self, rows))
    TASK.main(words("killed", **given))
    assert asked == [36]  # test rows, for the report
    for name in ("model.safetensors", "predictions.csv"):
        whole = (folder / "whole" / name).read_bytes()
        assert (folder / "killed" / name).read_bytes() == whole
        assert (folder / "numbers_teacher" / name).read_bytes() != whole
    for changed, said in (
        ({"distill_weight": 0.9}, "distill_weight: 0.5 in the checkpoint, 0.9 now"),
        ({"filter": "label < 2"}, "rows: 120 in the checkpoint, 1[0-9]* now"),
    ):
        with pytest.raises(CheckpointError, match=said):
            TASK.main(words("killed", **given, **changed))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "classes"}, "There it is a number, from .*, here one of 3 classes"),
        ({"kind": "classes", "task": "multilabel"}, "both must predict the same numbers or classes of rows"),
        ({"label_column": "other"}, r"from \['label'\], here a number, from \['other'\]"),
        ({"loss": "ranking"}, "goes without --streaming, --stock_trainer and --loss ranking"),
        ({"distill_weight": 1.5}, "distill_weight=1.5: must be at least 0 and"),
        ({"taught_by": None, "distill_from": "nowhere"}, "nowhere"),
        ({"taught_by": None, "unlabelled": "further.csv"}, "--unlabelled is for a student: give --distill_from"),
        ({"taught_by": None, "distill_weight": 0.3}, "--distill_weight is for a student"),
    ],
)
def test_a_teacher_that_cannot_be_and_flags_without_one_are_refused(bench, given, said):
    folder, words = bench
    if "label_column" in given:
        words("refused", taught_by="numbers")  # which writes the file
        pd.read_csv(folder / "numbers.csv").assign(other=lambda table: 2 * table["label"]).to_csv(folder / "two.csv")
        given = {**given, "dataset_name": folder / "two.csv"}
    with pytest.raises(ArgumentError, match=said):
        TASK.main(words("refused", **{"taught_by": "numbers", **given}))


def test_predict_and_evaluate_take_a_filter(bench, tmp_path):
    folder, words = bench
    words("x", taught_by="numbers")
    common = ["--dataset_name", str(folder / "numbers.csv"), "--filter", "label > 1", "--disable_tqdm", "true"]
    common += ["--use_cpu", "true", "--embedding_cache_dir", str(folder / "cache")]
    output = tmp_path / "predictions.csv"
    commands.predict([*common, "--model", str(folder / "numbers_teacher"), "--output", str(output)])
    labels = pd.read_csv(folder / "numbers.csv")["label"]
    table = pd.read_csv(output)
    assert table["source_row"].tolist() == [i + 2 for i, label in enumerate(labels) if label > 1]
    assert table["label"].min() > 1
    found = commands.evaluate([*common, "--models", str(folder / "numbers_teacher"), str(output)])
    assert found["num_rows"] == len(table)
    assert f"{len(table)} of 120 rows are used" in found["notes"][0]


def test_a_teacher_of_another_split_is_warned_of_and_the_doctor_says_so(bench, capsys):
    folder, words = bench
    given = words("other", taught_by="numbers", split_seed=7)
    with TASK.parse(given) as run:
        data = TASK.load(run)
        TASK.build(run, data)
    (said,) = [one for one in data.loaded.report["warnings"] if "--distill_from" in one]
    teacher, other = ({*pd.read_csv(folder / "numbers_teacher/predictions.csv")["sequence"]}, data.splits["test"])
    num_seen = sum(one not in teacher for one in other["sequence"])
    assert 10 < num_seen < 36
    assert f"{num_seen} of 36 distinct test rows are not in the list" in said
    capsys.readouterr()
    examine(TASK, ["--measure_seconds", "0", *given])
    assert f"{num_seen} of 36 distinct test rows are not in the list" in " ".join(capsys.readouterr().out.split())
    alike = words("alike", taught_by="numbers", dataset_name=os.path.relpath(folder / "numbers.csv"))
    examine(TASK, ["--measure_seconds", "0", *alike])
    assert "not in the list" not in capsys.readouterr().out
