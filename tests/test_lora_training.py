"""LoRA inside FastTrainer: adapters and heads are optimised and saved, nothing else; a resumed run is the whole one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from peft import LoraConfig, PeftModel, get_peft_model
from run_outcomes import losses, same_tensors, trained_weights
from safetensors.torch import load_file, save_file
from transformers import EsmForSequenceClassification, default_data_collator

from hf_ext.checkpoints import check_model
from hf_ext.data import SequenceCollator
from hf_ext.errors import CheckpointError
from hf_ext.models import AffinityModel, has_adapters
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 3}
# Six layers of one 16-wide ESM layer at rank 2 (448), and the classifier (306); see tests/speedups/test_fewer_bits.py.
PLAIN_TRAINABLE = 754
# The antigen tower: rank 8 on two layers of four 64 x 64 (1,024 each), 64 x 128 and 128 x 64 (1,536 each): 14,336.
# The head: 192 -> 8 -> 1 with biases (1,553); the mean and scale of 192 features (384) are saved and not trained.
TOWER_TRAINABLE = 14_336 + 1_553
TOWER_SAVED = TOWER_TRAINABLE + 384


def make_rows() -> Dataset:
    ids = [[0, 5 + i % 7, 6, 7, 8 + i % 3, 2] for i in range(24)]
    return Dataset.from_dict({"input_ids": ids, "labels": [i % 2 for i in range(24)]})


@pytest.fixture(params=["plain", "towers"])
def make_trainer(request, tmp_path, demo_rows, make_affinity):
    """A FastTrainer that trains with LoRA: an ESM classifier, or an affinity model with a frozen tower."""

    def make(folder, **given):
        settings = {"per_device_train_batch_size": 4, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, **given}
        args = FastTrainingArguments(output_dir=str(tmp_path / folder), use_peft=True, **{**QUIET, **settings})
        if request.param == "plain":
            args.lora_r = 2
            return FastTrainer(
                make_esm(EsmForSequenceClassification), args, default_data_collator, make_rows(), make_rows()
            )
        model, collator = make_affinity("frozen", "lora")
        return FastTrainer(model, args, collator, demo_rows.select(range(60)), demo_rows.select(range(60, 80)))

    make.kind = request.param
    return make


def weights_file(folder, kind):
    return Path(folder) / ("adapter_model.safetensors" if kind == "plain" else "model.safetensors")


def test_a_checkpoint_holds_adapters_and_head_only_and_resuming_is_bit_for_bit_the_whole_run(make_trainer):
    whole = make_trainer("whole")
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-3"
    file = weights_file(checkpoint, make_trainer.kind)
    tensors = load_file(file)
    saved = PLAIN_TRAINABLE if make_trainer.kind == "plain" else TOWER_SAVED
    assert sum(tensor.numel() for tensor in tensors.values()) == saved
    assert saved * 4 < file.stat().st_size < saved * 4 + 8192  # four bytes each, and the names
    assert not [name for name in tensors if "base_layer" in name or "embeddings" in name]
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    moments = [moment for state in states for moment in state.values()]
    kept = sum(moment.numel() for moment in moments if moment.dim())  # a step counter has none
    assert kept * 4 == whole.plan["lora"].evidence["adamw_bytes"]

    resumed = make_trainer("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert len(losses(whole)) == 6
    assert losses(resumed) == losses(whole)
    assert same_tensors(trained_weights(resumed.model), trained_weights(whole.model))

    name = next(name for name in tensors if "value.lora_B" in name)
    uneven = torch.linspace(0, 0.1, tensors[name].numel()).view_as(tensors[name])  # LayerNorm undoes an even shift
    save_file({**tensors, name: tensors[name] + uneven}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="sha256"):
        make_trainer("changed").train(resume_from_checkpoint=str(checkpoint))


def test_saved_and_merged_folders_predict_what_the_trained_model_predicts(make_trainer, tmp_path):
    trainer = make_trainer("a", save_strategy="no")
    untrained = trainer.predict(trainer.eval_dataset).predictions
    trainer.train()
    expected = trainer.predict(trainer.eval_dataset).predictions
    assert np.abs(expected - untrained).max() > 1e-3
    trainer.save_model(str(tmp_path / "saved"))
    trainer.save_merged(tmp_path / "merged")
    assert has_adapters(trainer.model)
    assert not list((tmp_path / "merged").glob("adapter*"))
    if make_trainer.kind == "plain":
        saved = PeftModel.from_pretrained(make_esm(EsmForSequenceClassification), tmp_path / "saved")
        merged = EsmForSequenceClassification.from_pretrained(tmp_path / "merged")
        collator = default_data_collator
    else:
        saved = AffinityModel.from_pretrained(tmp_path / "saved")
        merged = AffinityModel.from_pretrained(tmp_path / "merged")
        collator = SequenceCollator.from_pretrained(tmp_path / "merged")
    assert not has_adapters(merged)
    for model, tolerance in ((saved, 1e-6), (merged, 1e-5)):
        args = FastTrainingArguments(output_dir=str(tmp_path / "again"), **QUIET)
        again = FastTrainer(model, args, collator).predict(trainer.eval_dataset).predictions
        np.testing.assert_allclose(again, expected, rtol=0, atol=tolerance)


def test_the_best_checkpoint_is_taken_back_with_its_adapters(make_trainer):
    saving = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer("a", learning_rate=0.3, **saving)
    trainer.train()
    best = load_file(weights_file(trainer.state.best_model_checkpoint, make_trainer.kind))
    name = next(name for name in best if "lora_B" in name)
    state = trainer.model.state_dict()
    assert torch.equal(state[name if name in state else name.replace("lora_B.", "lora_B.default.")], best[name])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations[-1] == pytest.approx(min(evaluations), rel=1e-5)
    assert max(evaluations) > min(evaluations) + 1e-3


def test_weights_that_were_unfrozen_by_hand_are_in_the_saved_folder(tmp_path):
    make_esm(EsmForSequenceClassification).save_pretrained(tmp_path / "base", save_original_format=False)

    def make_base():
        return EsmForSequenceClassification.from_pretrained(tmp_path / "base")

    for task_type in (None, "SEQ_CLS"):
        config = LoraConfig(r=2, target_modules=["query"], task_type=task_type)
        model = get_peft_model(make_base(), config)
        by_hand = [p for name, p in model.named_parameters() if "LayerNorm" in name or name.endswith("layer.bias")]
        head = [] if task_type else [*model.base_model.model.classifier.parameters()]
        for parameter in (*by_hand, *head):
            parameter.requires_grad_(True)
        folder = tmp_path / str(task_type)
        settings = {"max_steps": 4, "save_strategy": "no", "learning_rate": 0.1, **QUIET}
        args = FastTrainingArguments(output_dir=str(folder), **settings)
        trainer = FastTrainer(model, args, default_data_collator, make_rows(), make_rows())
        trainer.train()
        trained = trainer.predict(make_rows()).predictions
        trainer.save_model()
        trainer.end()
        check_model(folder)
        trainer.model = PeftModel.from_pretrained(make_base(), folder)
        assert np.array_equal(trainer.predict(make_rows()).predictions, trained)
