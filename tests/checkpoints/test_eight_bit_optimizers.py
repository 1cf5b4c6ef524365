"""bitsandbytes' 8-bit optimizers by Trainer's own names: without pickle on disk, and bit for bit after a resume."""

import sys

import pytest
import torch
from miniature_esm import make_wide_esm
from run_outcomes import losses, trained_weights
from tiny_masked_lm import make_rows
from token_rows import pad_rows
from transformers import TrainerCallback

from hf_ext.errors import MissingDependencyError, PlanRefused
from hf_ext.optional import import_problem
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

NAMES = ["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit"]
CLASSES = ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit", "AdamW32bit", "RMSprop8bit"]
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
SMALL = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def make_trainer(folder, collator=pad_rows, **given):
    """Matrices of 64 x 64 and above, 4,096 numbers: those get 8-bit states."""
    args = FastTrainingArguments(output_dir=str(folder), **{**QUIET, **SMALL, **SAVING, **given})
    model = make_wide_esm(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return FastTrainer(model, args, collator, make_rows(32))


def states(trainer) -> set[torch.dtype]:
    return {state["state1"].dtype for state in trainer.optimizer.state.values()}


class LosesStates(TrainerCallback):
    """Sets the codes of the first moment to zero before the first step."""

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        if state.global_step == 2:
            for one in optimizer.state.values():
                one["state1"].zero_()


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("optim", "given"),
    [
        *((name, {}) for name in NAMES),
        ("adamw_8bit", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}),
        ("adamw_8bit", {"encoder_learning_rate": 1e-3, "gradient_accumulation_steps": 2}),
        ("lion_8bit", {"nan_policy": "skip", "max_grad_norm": 0.3}),
    ],
    ids=[*NAMES, "accumulation and clipping", "two rates", "nan policy"],
)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, optim, given):
    whole = make_trainer(tmp_path / "whole", optim=optim, **given)
    whole.train()
    make_trainer(tmp_path / "run", optim=optim, **{**given, "max_steps": 2}).train()
    resumed = make_trainer(tmp_path / "run", optim=optim, resume="auto", allow_changed=["max_steps"], **given)
    resumed.train()
    assert states(whole) == states(resumed) == {torch.uint8, torch.float32}
    assert losses(resumed) == losses(whole)
    ours, theirs = trained_weights(resumed.model), trained_weights(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_lost_its_states_ends_elsewhere(tmp_path):
    whole = make_trainer(tmp_path / "whole", optim="adamw_8bit")
    whole.train()
    make_trainer(tmp_path / "run", optim="adamw_8bit", max_steps=2).train()
    broken = make_trainer(tmp_path / "run", optim="adamw_8bit", resume="auto", allow_changed=["max_steps"])
    broken.add_callback(LosesStates())
    broken.train()
    ours, theirs = trained_weights(broken.model), trained_weights(whole.model)
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_states_on_disk_are_codes_maps_and_scales(tmp_path):
    trainer = make_trainer(tmp_path, optim="adamw_8bit", max_steps=2)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    tensors = [t for state in states for kept in state.values() if isinstance(kept, dict) for t in kept.values()]
    coded = sum(t.numel() for t in tensors if getattr(t, "dtype", None) == torch.uint8)
    assert coded == 2 * (5 * 64 * 64 + 2 * 64 * 128)  # four matrices of attention, lm_head's, two of feed-forward
    plain = make_trainer(tmp_path / "plain", max_steps=2)
    plain.train()
    ours, theirs = (
        f.stat().st_size for f in (checkpoint / "optimizer.pt", tmp_path / "plain" / "checkpoint-2" / "optimizer.pt")
    )
    assert ours < 0.6 * theirs


# --- what it does not go with -----------------------------------------------------------------------------------------


def test_muon_takes_adamw_alone(tmp_path):
    with pytest.raises(
        PlanRefused, match="would need --optim adamw_torch_fused or adamw_torch, and --optim adamw_8bit"
    ):
        make_trainer(tmp_path, optim="adamw_8bit", speedups="muon")


def test_without_bitsandbytes_the_extra_is_named_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"needed for --optim lion_8bit.*hf_ext\[quantization\]"):
        make_trainer(tmp_path, optim="lion_8bit")
    monkeypatch.undo()
    import_problem.cache_clear()
