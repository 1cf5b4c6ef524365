"""Several seeds in one command: each head is the run it would be alone, and the model predicts their mean."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from run_outcomes import same_tensors
from safetensors.torch import load_file

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.ensemble import predict_members, score_seeds, train_seeds
from hf_ext.affinity.scoring import SplitScores, compute_metrics
from hf_ext.data.tokenization import SequenceCollator
from hf_ext.errors import ArgumentError, CheckpointError, TrainingStopped
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.verdict import judge
from hf_ext.models.affinity import AffinityModel
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def splits(demo_rows):
    parts = {"train": range(120), "validation": range(120, 160), "test": range(160, 200)}
    return {name: demo_rows.select(rows) for name, rows in parts.items()}


@pytest.fixture(scope="module")
def make_trainer(make_affinity, cache, splits):
    """A trainer as the recipe makes it, and the arguments it was made from."""

    def make(folder, num_seeds=1, trainer_class=FastTrainer, **given):
        args = FastTrainingArguments(
            output_dir=str(folder),
            embedding_cache_dir=str(cache),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **{
                "speedups": ["embedding_cache"],
                "learning_rate": 1e-2,
                "num_train_epochs": 2,
                "per_device_train_batch_size": 16,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "load_best_model_at_end": True,
                "metric_for_best_model": "spearman",
                "resume": "auto",
                **given,
            },
        )
        model, collator = make_affinity(seed=args.seed, num_seeds=num_seeds, head_dropout=0.1)
        data = splits["train"], splits["validation"]
        return trainer_class(model, args, collator, *data, compute_metrics=compute_metrics), args

    return make


@pytest.fixture(scope="module")
def ensemble(make_trainer, tmp_path_factory):
    """A trained ensemble of three: its trainer, what training returned, its folder with the model."""
    folder = tmp_path_factory.mktemp("ensemble")
    trainer, args = make_trainer(folder, 3)
    trained = train_seeds(trainer, args)
    trainer.save_model()
    return trainer, trained, folder


def head_of(folder):
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("head.")}


@pytest.mark.nightly
def test_every_member_is_the_single_run_with_its_seed_bit_by_bit(ensemble, make_trainer, tmp_path):
    trainer, trained, folder = ensemble
    assert trained.seeds == [42, 43, 44]
    alone, _ = make_trainer(tmp_path, seed=44)
    alone.train()
    alone.save_model()
    assert same_tensors(head_of(tmp_path), head_of(folder / "seed-44"))
    assert not same_tensors(head_of(tmp_path), head_of(folder / "seed-43"))  # seeds differ, and the comparison sees it
    assert trained.runs[2]["best"]["value"] == alone.state.best_metric
    assert trained.runs[2]["alarms"] == alone.collapse_alarms
    assert [alarm for alarm in trainer.collapse_alarms if alarm["seed"] == 44] == [
        {**alarm, "seed": 44} for alarm in alone.collapse_alarms
    ]


def test_the_saved_folder_is_one_model_of_the_mean_that_holds_encoders_by_reference_and_heads_once(ensemble, splits):
    trainer, _, folder = ensemble
    members = predict_members(trainer, splits["test"])
    assert members.shape == (40, 3)
    assert members.std(axis=1).min() > 0
    mean = trainer.predict(splits["test"]).predictions
    np.testing.assert_allclose(mean, members.mean(1), rtol=0, atol=1e-5)
    loaded, single = (AffinityModel.from_pretrained(path).eval() for path in (folder, folder / "seed-43"))
    assert loaded.config.ensemble_size == 3
    assert all(name.startswith("head.members.") for name in load_file(folder / "model.safetensors"))
    batch = SequenceCollator.from_pretrained(folder)([*splits["test"]])
    with torch.no_grad():
        output, alone = loaded(**batch), single(**batch)
    np.testing.assert_allclose(output.logits, mean, rtol=0, atol=1e-4)
    np.testing.assert_allclose(output.member_logits, members, rtol=0, atol=1e-4)
    np.testing.assert_allclose(members[:, 1], alone.logits, rtol=0, atol=1e-4)
    assert alone.member_logits is None


class StoppedTrainer(FastTrainer):
    """Is stopped in the second epoch of seed 43."""

    def training_step(self, *args, **kwargs):
        if self.args.seed == 43 and self.state.global_step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(*args, **kwargs)


def test_a_stopped_command_continues_where_it_was_and_trains_no_finished_seed_again(
    ensemble, make_trainer, tmp_path, caplog
):
    trainer, args = make_trainer(tmp_path, 3, StoppedTrainer)
    with pytest.raises(TrainingStopped):
        train_seeds(trainer, args)
    first = tmp_path / "seed-42"
    assert (first / "finished.json").is_file()
    assert not (tmp_path / "seed-43" / "finished.json").exists()
    written = (first / "model.safetensors").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        trainer, args = make_trainer(tmp_path, 3)
        trained = train_seeds(trainer, args)
    assert "Seed 42 has finished" in caplog.text
    assert "Continuing from" in caplog.text
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert len(trained.runs) == 3
    _, _, whole = ensemble
    assert all(
        same_tensors(head_of(tmp_path / name), head_of(whole / name)) for name in ("seed-42", "seed-43", "seed-44")
    )


def test_finished_seeds_of_another_run_are_refused_and_resume_no_trains_them_again(ensemble, make_trainer, tmp_path):
    shutil.copytree(ensemble[2], tmp_path, dirs_exist_ok=True)
    before = head_of(tmp_path / "seed-42")
    trainer, args = make_trainer(tmp_path, 2, learning_rate=5e-3)
    with pytest.raises(CheckpointError, match=r"seed-42 was written by a run that differs:\n  learning_rate"):
        train_seeds(trainer, args)
    trainer, args = make_trainer(tmp_path, 2, learning_rate=5e-3, resume="no", num_train_epochs=1)
    train_seeds(trainer, args)
    assert not same_tensors(before, head_of(tmp_path / "seed-42"))


def test_what_several_seeds_cannot_share_is_refused_with_the_way_out(make_trainer, make_affinity, tmp_path):
    with pytest.raises(ArgumentError, match=r"Run 3 commands, each with another --seed and --output_dir"):
        make_affinity(num_seeds=3, tower_training=["lora"])
    with pytest.raises(ArgumentError, match="Leave one of them out"):
        make_affinity(num_seeds=3, init_head_from="x")
    trainer, args = make_trainer(tmp_path, 2, speedups=[])
    with pytest.raises(ArgumentError, match="embedding cache, which is off"):
        train_seeds(trainer, args)
    trainer, args = make_trainer(tmp_path, 2, resume="outputs/checkpoint-7")
    with pytest.raises(ArgumentError, match="Use --resume auto or no"):
        train_seeds(trainer, args)
    with pytest.raises(ArgumentError, match="must be at least 1"):
        AffinityArguments(num_seeds=0)


def test_facts_hold_each_seed_the_mean_and_what_the_spread_is_worth(ensemble, splits):
    trainer, trained, _ = ensemble
    labels = np.asarray(splits["test"]["label"][:], np.float64)
    mean = trainer.predict(splits["test"]).predictions
    verdict = judge(labels, {"model": mean, "training mean": np.full(40, 7.0)})
    test = SplitScores(mean, labels, verdict, {"model": score_predictions(mean, labels)})
    seeds = score_seeds(trainer, trained, splits, test, 9.0, None)
    members = predict_members(trainer, splits["test"]).astype(np.float64)
    rmse = [float(np.sqrt(np.mean((one - labels) ** 2))) for one in members.T]
    assert seeds.facts["scores"]["rmse"]["values"] == pytest.approx(rmse)
    assert seeds.facts["scores"]["rmse"]["std"] == pytest.approx(np.std(rmse, ddof=1))
    assert seeds.facts["ensemble"]["rmse"]["value"] <= seeds.facts["scores"]["rmse"]["mean"]  # Jensen
    assert seeds.std == pytest.approx(members.std(axis=1, ddof=1))
    assert "initialisation" in seeds.text()
    assert json.loads(json.dumps(seeds.facts))["seeds"] == [42, 43, 44]
    # A spread that is the error of the mean ranks errors without a fault.
    knowing = SplitScores(mean, members.mean(1) + seeds.std, verdict, test.scores)
    uncertainty = score_seeds(trainer, trained, splits, knowing, 9.0, None).facts["uncertainty"]
    assert uncertainty["spearman_of_error"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert uncertainty["mean_std"] == pytest.approx(seeds.std.mean())
