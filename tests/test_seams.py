"""Every method of Trainer that hf_ext overrides, and every private one that it calls, has the signature we know.

A release of transformers that changes one is named here, method by method, before it shows as a wrong number. A new
override has to be written down.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import transformers
from transformers import Trainer

import hf_ext
from hf_ext.trainer import FastTrainer
from hf_ext.training import find_override
from hf_ext.training.host import TRAINING_LOSS

pytestmark = pytest.mark.internals

# As Trainer has them in transformers 5.24; what is indented goes on.
SIGNATURES = """
__init__(model=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, processing_class=None,
    model_init=None, compute_loss_func=None, compute_metrics=None, callbacks=None, optimizers=(None, None),
    optimizer_cls_and_kwargs=None, preprocess_logits_for_metrics=None)
_finalize_training(trial, num_train_samples, start_time)
_get_dataloader(dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None)
_get_grad_norm(model, grad_norm=None)
_get_num_items_in_batch(batch_samples, device)
_get_output_dir(trial)
_load_best_model()
_load_from_checkpoint(resume_from_checkpoint, model=None)
_run_epoch(model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, ignore_keys_for_eval,
    start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)
_save(output_dir=None, state_dict=None)
_save_checkpoint(model, trial)
compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None)
create_optimizer(model=None)
end()
evaluate(eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')
evaluation_loop(dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix='eval')
get_eval_dataloader(eval_dataset=None)
log(logs, start_time=None)
push_to_hub(commit_message='End of training', blocking=True, token=None, revision=None, private=None, **kwargs)
save_model(output_dir=None, _internal_call=False)
train(resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)
training_step(model, inputs, num_items_in_batch=None)
"""
OVERRIDDEN = dict(
    re.fullmatch(r"(\w+)(.*)", " ".join(entry.split())).groups() for entry in re.split(r"\n(?! )", SIGNATURES.strip())
)
# Private ones that hf_ext calls and does not override.
CALLED = {
    "_get_collator_with_removed_columns": "(data_collator, description=None)",
    "_get_eval_sampler": "(eval_dataset)",
    "_get_train_sampler": "(train_dataset=None)",
    "_move_model_to_device": "(model, device)",
    "_remove_unused_columns": "(dataset, description=None)",
}
ATTRIBUTES = {
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "_tr_loss",
    "_train_batch_size",
    "_trial",
}  # that Trainer sets and hf_ext uses


def overridden(cls: type) -> set[str]:
    """Methods of Trainer that a class of hf_ext defines anew."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "hf_ext"]
    names = {name for base in own for name in vars(base) if name == "__init__" or not name.startswith("__")}
    return {name for name in names if inspect.isroutine(getattr(Trainer, name, None))}


def private_names(folder: Path) -> set[str]:
    """Private names that code in `folder` reads or sets of an object."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if node.attr.startswith("_") and not node.attr.startswith("__")}


def assigned_by_trainer() -> set[str]:
    """Private attributes that Trainer gives itself."""
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(Trainer))) if isinstance(node, ast.Attribute)]
    stored = [node for node in nodes if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"]
    return {node.attr for node in stored if node.attr.startswith("_")}


def describe(method: object) -> str:
    """A signature without annotations, which say nothing of how to call it."""
    signature = inspect.signature(method)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare[1:], return_annotation=inspect.Signature.empty))


def compare(found: set[str], pinned: dict[str, str], owner: type = Trainer) -> list[str]:
    """What is not as it is written down here, a line each."""
    new = [f"{name} is not written down: {describe(getattr(owner, name))}" for name in sorted(found - pinned.keys())]
    gone = [f"{name}: no longer needed here" for name in sorted(pinned.keys() - found)]
    now = {name: describe(getattr(owner, name)) for name in sorted(found & pinned.keys())}
    changed = [f"{name}: {pinned[name]} is now {text}" for name, text in now.items() if text != pinned[name]]
    return [*changed, *new, *gone]


def test_the_methods_that_hf_ext_overrides_have_the_signatures_that_it_knows():
    changes = compare(overridden(FastTrainer), OVERRIDDEN)
    assert changes == [], f"transformers {transformers.__version__}: look at each in hf_ext, then write it down"


def test_the_private_methods_that_hf_ext_calls_have_the_signatures_that_it_knows():
    names = private_names(Path(hf_ext.__file__).parent)
    called = {name for name in names if inspect.isroutine(getattr(Trainer, name, None))} - OVERRIDDEN.keys()
    assert compare(called, CALLED) == [], f"transformers {transformers.__version__}: look at each in hf_ext"


def test_the_private_attributes_that_hf_ext_uses_are_still_trainers():
    used = private_names(Path(hf_ext.__file__).parent) & assigned_by_trainer()
    assert used == ATTRIBUTES, f"transformers {transformers.__version__}: look at each in hf_ext"


def test_the_scan_sees_an_override_that_is_not_written_down_and_a_signature_that_changed():
    new = type("New", (FastTrainer,), {"__module__": "hf_ext.new", "_has_mixed_mesh_grads": lambda self, model: None})
    assert compare(overridden(new), OVERRIDDEN) == ["_has_mixed_mesh_grads is not written down: (model)"]

    class Other(Trainer):
        def training_step(self, model, inputs):
            """Without the number of items."""

    (line,) = compare(overridden(FastTrainer), OVERRIDDEN, Other)
    assert line == "training_step: (model, inputs, num_items_in_batch=None) is now (model, inputs)"


def test_overrides_are_found_wherever_they_stand():
    def mine(self, *args):
        """Somebody's."""

    above = type("Above", (FastTrainer,), {"compute_loss": mine})
    below = type("Below", (FastTrainer, type("Other", (Trainer,), {"compute_loss": mine})), {})
    stock = type("Stock", (FastTrainer,), {"compute_loss": Trainer.compute_loss})
    for cls, found in ((above, "Above"), (type("Child", (above,), {}), "Above"), (below, "Other"), (stock, "Stock")):
        assert find_override(cls.__new__(cls), *TRAINING_LOSS) == f"{found}.compute_loss"
    trainer = FastTrainer.__new__(FastTrainer)
    trainer.compute_loss = trainer.compute_loss  # what was there
    assert find_override(trainer, *TRAINING_LOSS) is None
    trainer.compute_loss = mine
    assert find_override(trainer, *TRAINING_LOSS) == "compute_loss, assigned to the trainer"


def test_a_patched_class_of_transformers_is_an_override_though_it_bears_the_name(monkeypatch):
    before = Trainer.compute_loss

    def patched(self, *args, **kwargs):
        return before(self, *args, **kwargs)

    patched.__module__ = before.__module__  # as `functools.wraps` makes it
    monkeypatch.setattr(Trainer, "compute_loss", patched)
    assert find_override(FastTrainer.__new__(FastTrainer), "compute_loss") == "Trainer.compute_loss"
