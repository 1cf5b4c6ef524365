"""A head trained on cached embeddings goes on in a model that fine-tunes the same encoders."""

import json
import shutil

import numpy as np
import pytest
import torch

from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

EXACT = ["cpu_matmul", "encoder_precision", "precision", "tf32"]


def make_trainer(parts, rows, folder, **given):
    model, collator = parts
    args = FastTrainingArguments(
        output_dir=str(folder),
        embedding_cache_dir=str(folder / "cache"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=16,
        **{"learning_rate": 1e-2, "max_steps": 8, "without": EXACT, **given},
    )
    return FastTrainer(model, args, collator, rows)


@pytest.fixture(scope="module")
def frozen_run(make_affinity, demo_rows, tmp_path_factory):
    """Folder of a run on cached embeddings, and what it predicts for rows that it has not seen."""
    folder = tmp_path_factory.mktemp("frozen")
    trainer = make_trainer(make_affinity(), demo_rows.select(range(120)), folder, speedups=["all"])
    assert trainer.plan.applied("embedding_cache")
    trainer.train()
    trainer.save_model()
    return folder, trainer.predict(demo_rows.select(range(160, 200))).predictions


def test_before_its_first_step_a_fine_tuned_model_predicts_what_the_frozen_run_predicts(
    make_affinity, frozen_run, demo_rows, tmp_path
):
    folder, expected = frozen_run
    rows = demo_rows.select(range(160, 200))
    for training in (["full", "frozen"], ["frozen", "lora"]):
        trainer = make_trainer(make_affinity(tower_training=training, init_head_from=str(folder)), rows, tmp_path)
        np.testing.assert_allclose(trainer.predict(rows).predictions, expected, rtol=0, atol=1e-4)
    other = make_trainer(make_affinity(tower_training=training), rows, tmp_path)
    assert np.abs(other.predict(rows).predictions - expected).max() > 0.5  # a head that was not carried over


def test_training_keeps_the_scales_that_came_with_the_head(make_affinity, frozen_run, demo_rows, tmp_path):
    folder, _ = frozen_run
    saved = json.loads((folder / "config.json").read_text())
    shifted = demo_rows.select(range(40)).map(lambda row: {"label": row["label"] + 100})
    model, collator = make_affinity(tower_training=["lora"], init_head_from=str(folder))
    mean = model.head.input_mean.clone()
    make_trainer((model, collator), shifted, tmp_path, max_steps=1).train()
    assert (model.config.label_mean, model.config.label_std) == (saved["label_mean"], saved["label_std"])
    assert torch.equal(model.head.input_mean, mean)
    assert mean.abs().max() > 0

    fresh, collator = make_affinity(tower_training=["lora"])
    make_trainer((fresh, collator), shifted, tmp_path, max_steps=1).train()
    assert fresh.config.label_mean > 100  # what measuring the scales again would have made of it


def test_a_head_that_does_not_fit_is_refused_with_all_differences(make_affinity, frozen_run):
    given = {"pooling": ["max"], "tower_inputs": ["heavy+light", "antigen"], "head_sizes": [8, 4]}
    with pytest.raises(ArgumentError) as error:
        make_affinity(init_head_from=str(frozen_run[0]), **given)
    said = ["that head does not fit:", "inputs: ['heavy', 'light', 'antigen'] there", "pooling: ['mean', "]
    assert all(line in str(error.value) for line in [*said, "head sizes: [8] there, [8, 4] here"])
    with pytest.raises(ArgumentError) as error:
        make_affinity(init_head_from=str(frozen_run[0]), layer="1", head_sizes=[8])
    assert str(error.value).endswith("not fit:\n  layers: ['last', 'last', 'last'] there, [1, 1, 1] here")


def test_other_encoders_are_refused_and_moved_ones_are_not(make_affinity, frozen_run, demo_encoders, tmp_path):
    bert, esm = demo_encoders
    shutil.copytree(bert, tmp_path / "moved")
    make_affinity(encoders=[str(tmp_path / "moved"), esm], init_head_from=str(frozen_run[0]))
    (tmp_path / "moved" / "config.json").write_text((tmp_path / "moved" / "config.json").read_text() + "\n")
    with pytest.raises(ArgumentError, match=r"does not fit:\n  encoders: \['sha256:") as error:
        make_affinity(encoders=[str(tmp_path / "moved"), esm], init_head_from=str(frozen_run[0]))
    assert len(str(error.value).splitlines()) == 2


def test_what_holds_no_head_trained_on_frozen_encoders_is_refused(make_affinity, demo_rows, demo_encoders, tmp_path):
    for folder, reason in ((tmp_path / "nowhere", "no folder here"), (demo_encoders[1], "no inputs.json there")):
        with pytest.raises(ArgumentError, match=reason):
            make_affinity(init_head_from=str(folder))
    trainer = make_trainer(
        make_affinity(tower_training=["lora", "full"]), demo_rows.select(range(40)), tmp_path, max_steps=1
    )
    trainer.save_model()
    with pytest.raises(ArgumentError, match="that model has never been trained"):
        make_affinity(init_head_from=str(tmp_path))
    trainer.train()
    trainer.save_model()
    with pytest.raises(ArgumentError, match=r"its encoders were trained too \(full, lora\)"):
        make_affinity(init_head_from=str(tmp_path))
