"""`FastTrainer`: one override per method of Trainer that hf_ext takes part in, in the order of a run.

Each hands over to the parts of `hf_ext/training`, in the order in which they must act; where an order has a reason,
it stands beside it. Callbacks that need much of the trainer hold it; others are handed what they need call by call.

Private names of ours begin with `_ext_`: the others are Trainer's, and those of users' subclasses meet neither.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy

from .checkpoints.agreement.hyperparameters import read_hyperparameters
from .checkpoints.agreement.run_facts import describe_run
from .checkpoints.manifest import check_unlisted
from .checkpoints.retention import Sizes
from .checkpoints.run_lock import hold_folders
from .checkpoints.saver import Saver
from .checkpoints.weights import load_weights, save_checkpoint_weights
from .data.even_batches import RepeatedRows
from .data.random_states import capture_rng, kept_random_states, restore_rng
from .data.repeatable_loaders import base_of
from .data.seeded_batches import NumberedBatches
from .data.worker_deaths import BROKEN
from .embeddings.dataset import EmbeddedDataset
from .embeddings.store import EmbeddingStore
from .errors import DiskFailure, RunEnded, StoppedForGood, TrainingStopped
from .held import replaced
from .hub.push import HubError
from .hub.pusher import Pusher
from .overrides import BATCHES, EVALUATION_LOSS, TRAINING_LOSS, find_override, find_own_loss
from .plain_arguments import CurrentArguments, complete_arguments
from .plan import Plan
from .reporting.progress import messages_above_bars, show_live
from .training.backends import Backend, choose_backend
from .training.comparable import spell_out_best
from .training.encoding import Encoding
from .training.evaluation_passes import gives_states, without_states
from .training.evaluation_record import EvaluationRecord
from .training.evaluation_schedule import is_evaluated
from .training.evaluator import Means
from .training.exporter import can_save_itself, save_pretrained
from .training.first_look import check_batches, check_rows, check_training, check_weights, try_evaluation
from .training.leaving import release_group, share_group
from .training.loader_request import LoaderRequest
from .training.loaders import in_order, reads_text, take_rows
from .training.losses import DecidedLoss, Losses, countable
from .training.nan_guard import can_be_best, unfiltered
from .training.now import Training
from .training.oom_policy import find_batch_size
from .training.optimizers import finish_optimizer
from .training.parts import Parts
from .training.planned import plan_run
from .training.scaling import fit_scaling
from .training.signals import keep_from_workers
from .training.team import Team
from .training.watcher import extended

logger = logging.getLogger(__name__)

PARAMETERS = tuple(inspect.signature(Trainer.__init__).parameters)[1:]


class FastTrainer(Trainer):
    """`transformers.Trainer` with a plan: takes the same arguments, plus `plan`; use it the same way.

    Where a speed-up is applied, `trainer.args` is a copy with what the plan set: a second trainer made from the
    caller's `args` does not scale a learning rate that is scaled already. Without, it is the caller's; of plain
    `TrainingArguments`, too. Trainers of other libraries go in front:
    `class Mine(SFTTrainer, FastTrainer)`.

    Raises (from the constructor):
        PlanRefused: a request would do something else than asked on this machine, model or data.
        ArgumentError: arguments that contradict each other.
    """

    model: Any  # of any class; Trainer declares these for type checkers alone
    data_collator: Any
    eval_dataset: Any
    hub_model_id: Any
    push_in_progress: Any

    def __init__(self, *args: Any, plan: Plan | None = None, **kwargs: Any):
        given = _by_name(args, kwargs)
        own_loss = find_own_loss(self, given.get("compute_loss_func"))
        self._ext_planned = plan_run(given, plan, own_loss, find_override(self, *BATCHES))
        run = self._ext_planned.run
        self._ext_args, self._ext_current_args = run.args, cast(Any, CurrentArguments(self))
        # Trainer's constructor asks for the loss, and opens the repository on the Hub.
        self._ext_team, self._ext_losses = Team(self._ext_current_args), Losses(self._ext_current_args)
        self._ext_pusher = Pusher(self)
        self._ext_planned.apply()  # before Trainer reads arguments, and puts the model on its device
        with self._ext_planned.restored_on_error():
            super().__init__(**{**given, "args": run.args, "model": run.model})  # a speed-up may have wrapped it
            self._ext_losses.settle()
            self._ext_backend.check_given(self.optimizer, self.lr_scheduler)
            self._ext_listen()
            self._ext_saver.open_folders()  # refuses those that cannot go together
        if self.loss_is_scaled_for_ga is None:
            self._ext_losses.warn_of_means(self._ext_decided_loss(), self.model_accepts_loss_kwargs)
        share_group(self)
        run.let_go_with(self)
        self._ext_planned.save()

    @property
    def args(self) -> Any:
        """The arguments; others may be assigned at any time, and count from then on."""
        return self._ext_args

    @args.setter
    def args(self, args: Any) -> None:
        self._ext_args = complete_arguments(args)
        if "_ext_planned" in vars(self):  # a subclass may assign before the constructor
            self._ext_planned.run.args = self._ext_args

    @cached_property
    def _ext_parts(self) -> Parts:
        # Made when first asked for: a class behind this one may do so in its constructor.
        known = {"sets": self.eval_dataset, "compute_metrics": self.compute_metrics, "collator": self.data_collator}
        return Parts(self, self._ext_current_args, self._ext_team, self._ext_planned, self._ext_backend, **known)

    _ext_stopper: Any = property(attrgetter("_ext_parts.stopper"))
    _ext_evaluator: Any = property(attrgetter("_ext_parts.evaluator"))
    _ext_resumer: Any = property(attrgetter("_ext_parts.resumer"))

    @cached_property
    def _ext_saver(self) -> Saver:
        return Saver(self)

    def _ext_listen(self) -> None:
        show_live(self.callback_handler.callbacks)
        for listener in self._ext_parts.listeners():
            self.add_callback(listener)
        self.add_callback(Events(self))  # what comes after all of theirs

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer; then sets what it has no argument for. Called again for each trial of a search."""
        super().create_accelerator_and_postprocess()
        if "_ext_backend" in vars(self):
            self._ext_backend.renew(self.accelerator)
        else:
            self._ext_backend: Backend = choose_backend(self._ext_current_args, self.accelerator, self._ext_planned)
        self._ext_backend.configure(self.model)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository, private unless `hub_private_repo` is False, and proves that it can be written to.

        Raises:
            HubError: on all processes; see `open_repository`.
            ArgumentError: `hub_strategy` would push a library's pickles.
        """
        self.hub_model_id = self._ext_pusher.open(token, private)
        self.push_in_progress = self._ext_pusher

    # --- the beginning of a run -------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; `resume_from_checkpoint` may also be "auto", and where it is None, `args.resume` decides.

        Raises:
            ArgumentError, DataError: the run would train nothing, or metrics, labels or long rows would end it later.
            FolderError: another process's run has the folder; on all processes.
            CheckpointError: a named checkpoint is damaged, or the run contradicts the checkpoint.
            NotFiniteError: a loss or the weights are NaN or infinite; such weights are never saved.
            DataWorkerDied: a data worker was killed.
            DiskFailure: too many checkpoints in a row could not be written, or the last one not copied.
            TrainingStopped: a signal or a time limit stopped training, after a checkpoint; `StoppedForGood`, which is
                one too, where the same call would not go on from it.
        """
        has_own_loader = find_override(self, "get_train_dataloader") is not None
        check_training(self.args, None if has_own_loader else getattr(self, "train_dataset", None), self.model)
        with hold_folders(self.args):  # before anything in it is looked at
            self._ext_saver.open_folders()
            self.callback_handler.callbacks.sort(key=lambda callback: isinstance(callback, Events))  # those come last
            self._ext_planned.save()  # the folder may be another one than when it was planned
            if self._ext_planned.applied("find_batch_size"):
                with kept_random_states(self.train_dataset, self.data_collator):  # which rows may draw from
                    self._ext_find_batch_size()
            folder = self._ext_find_checkpoint(resume_from_checkpoint)
            output = self._ext_train_and_copy(partial(super().train, folder, *args, **kwargs))
            if self._ext_stopper.reason is not None:
                self._ext_team.wait_for_everyone()  # torchrun ends the others as soon as one has ended
                raise self._ext_stop()
        return output

    def check_arguments(self, undecided: Collection[str] = ()) -> None:
        """Before work that comes ahead of `train`: raises CheckpointError where that will refuse to go on.

        Args:
            undecided: names of arguments that may still change. Called on the main process.
        """
        self._ext_resumer.check_arguments(self._ext_describe_run(), undecided)

    def _ext_stop(self) -> TrainingStopped:
        saved = f"{self.stop_reason}: saved checkpoint-{self.state.global_step} and stopped."
        why_not = self._ext_resumer.why_not_again
        if why_not is not None:
            return StoppedForGood(f"{saved} {why_not}")
        return TrainingStopped(f"{saved} The same command continues from it.")

    def _ext_find_batch_size(self) -> None:
        """Before the run is compared with its checkpoint, which asks for the rows of a step."""
        self._ext_embed_all()
        find_batch_size(self, self._ext_planned, self._ext_team.agree)
        self._train_batch_size = self.args.train_batch_size

    def _ext_make_train_batch(self, rows: Sequence[int]) -> Any:
        """A batch of these rows of the training data, as a loader would make it."""
        dataset: Any = self.train_dataset
        if self._ext_parts.embedder.is_on:
            dataset = self.embed_dataset(dataset)
        fetch = getattr(dataset, "__getitems__", None)
        return self._ext_make_batch(self.data_collator, fetch([*rows]) if fetch else [dataset[row] for row in rows])

    def _ext_describe_run(self) -> dict[str, Any]:
        args, best = self.args, spell_out_best(self.args, self.compute_metrics)
        data, written_by = (self.train_dataset, self.data_collator), self._ext_backend.written_by
        return describe_run(args, self.model, *data, args.world_size, self.plan, best, written_by)

    def _ext_find_checkpoint(self, asked: str | bool | None) -> str | None:
        facts = self._ext_describe_run()
        resumed = self._ext_resumer.find(asked, facts)
        is_own = resumed is not None and resumed.is_own
        steps = (resumed.stored.step, resumed.state_of("best_saved_step")) if is_own else (None, None)
        self._ext_saver.begin_run(facts, *steps)
        return None if resumed is None else str(resumed.folder)

    def _ext_train_and_copy(self, train: Callable[[], Any]) -> Any:
        """With `local_checkpoint_dir`, returns when the last checkpoint is in `output_dir`."""
        try:
            with self._ext_planned.measuring():
                self._ext_embed_all()  # while the encoders are in memory; scales are drawn from the tables
                output = train()
        except RunEnded:
            self._ext_saver.finish_copies()
            raise
        lacking = self._ext_saver.finish_copies()
        if lacking is not None:
            raise DiskFailure(lacking)
        return output

    def _ext_embed_all(self) -> None:
        if self._ext_parts.embedder.is_on:
            for dataset in (self.train_dataset, *self._ext_eval_sets.values()):
                if hasattr(dataset, "__len__"):
                    self.embed_dataset(dataset)
            self.model.release_encoders()
        if hasattr(self.model, "fit_scaling") and not self.model.config.is_scaled:
            self.fit_scaling()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        folder, parts = kwargs.get("resume_from_checkpoint"), self._ext_parts
        resumed = self._ext_resumer.resumed
        self._ext_rng_made_up: dict[str, Any] | None = None
        parts.repeatable.go_on(None if resumed is None else resumed.state_of("begun_loaders") or ["train"])
        with ExitStack() as around:
            around.enter_context(parts.workers.naming_deaths())
            around.callback(parts.profiling.leave)
            around.enter_context(unfiltered(self.args))
            around.enter_context(
                self._ext_stopper.during_training(folder is not None, kwargs.get("ignore_keys_for_eval"))
            )
            self._ext_evaluator.begin(self.callback_handler.callbacks, self._ext_resumer.resumed)
            around.enter_context(messages_above_bars(self.callback_handler.callbacks))
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except BROKEN:
                time.sleep(0.1)  # torch raises where it hears of a worker's death: here, and not while all is left
                raise

    # --- data -------------------------------------------------------------------------------------------------------

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        is_text = reads_text(self.data_collator)
        return dataset if is_text else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        is_text = reads_text(self.data_collator)
        return data_collator if is_text else super()._get_collator_with_removed_columns(data_collator, description)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset if train_dataset is None else train_dataset
        make_stock = partial(super()._get_train_sampler, train_dataset)
        return self._ext_parts.loaders.sampler(rows, self.data_collator, make_stock)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return in_order(eval_dataset, self.args.world_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As in Trainer; for an evaluation while training, of the subset."""
        loader = self._ext_evaluator.loader(self._ext_means()) if self.is_in_train else None
        if loader is not None:
            return loader
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        key = rows if isinstance(rows, str) else "eval"
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        self._ext_parts.repeatable.look_at(key, rows, vars(self).get("_eval_dataloaders", {}))
        return super().get_eval_dataloader(eval_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
        rows: Any = None,
    ) -> Any:
        if self._ext_parts.embedder.is_on and hasattr(dataset, "__len__"):
            dataset = self.embed_dataset(dataset)
            self.model.release_encoders()
        if rows is not None:  # taken after that: one table for all parts of a set
            dataset = take_rows(dataset, rows)
        asked = {"sampler_fn": sampler_fn, "is_training": is_training, "dataloader_key": dataloader_key}
        stock = partial(super()._get_dataloader, dataset, description, batch_size, **asked)
        columns = self._remove_unused_columns, self._get_collator_with_removed_columns
        request = LoaderRequest(
            dataset, description, batch_size, self.data_collator, sampler_fn, self.accelerator.prepare, *columns, stock
        )
        loaders, repeatable = self._ext_parts.loaders, self._ext_parts.repeatable
        if is_training:
            return keep_from_workers(repeatable.take_train(loaders.train(request, self.loss_counts_items)))
        key = None if rows is not None else dataloader_key
        own = self.eval_dataset.get(key) if isinstance(self.eval_dataset, Mapping) else self.eval_dataset
        return keep_from_workers(repeatable.take_evaluation(loaders.evaluation(request), key, own))

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As in Trainer; called with the loader that training will use, also where it is the user's own."""
        check_batches(args, dataloader)
        self._ext_parts.repeatable.adopt(dataloader, is_training=True)
        resumed = self._ext_resumer.resumed
        self._ext_parts.loaders.load(resumed.state_of("data_position") if resumed else None)
        return super().set_initial_training_values(args, dataloader)

    # --- model, optimizer, schedule ---------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # The model of this run: with `model_init`, callbacks are handed the one before it (transformers 5.23).
        self.throughput.model = self.model
        backend = self._ext_backend
        own_loss = find_own_loss(self, self.compute_loss_func)
        if not own_loss and not find_override(self, *BATCHES):
            num_seen = max_steps * self.get_total_train_batch_size(self.args)
            check_rows("train", self.train_dataset, self.model, self.data_collator, num_seen)
            for name, rows in (self._ext_eval_sets if is_evaluated(self.args) else {}).items():
                check_rows(name, rows, self.model, self.data_collator)
        with backend.preparing(self.model, own_loss):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if not backend.is_spread:  # DeepSpeed keeps float32 of its own
            check_weights(self.model, getattr(self.accelerator, "scaler", None) is not None)
        if resume_from_checkpoint is None:  # the model is wrapped, and callbacks have not begun to count
            try_evaluation(self)
        return prepared

    @property
    def _ext_eval_sets(self) -> dict[str, Any]:
        """Evaluation sets by the prefix of their metrics."""
        several = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"": self.eval_dataset}
        return {"eval" if name == "" else f"eval_{name}": rows for name, rows in several.items()}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; where the plan or the arguments say so, with Muon, groups for encoders, or on the host."""
        is_new = self.optimizer is None
        made = super().create_optimizer(*args, **kwargs)
        finished = finish_optimizer(
            made, is_new, self.model, self.plan, self.args.encoder_learning_rate, self.args.block_pattern
        )
        if finished is not made:
            self.optimizer = finished
        self._ext_backend.check_optimizer(finished)
        return finished

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, which calls it as soon as accelerate has prepared model and optimizer."""
        self._ext_backend.finish_splitting(self.model, self.optimizer)
        schedule = super().create_scheduler(*args, **kwargs)
        self._ext_made = read_hyperparameters(self.optimizer)  # before a checkpoint's states bring back its own
        return schedule

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, in the precision that the backend's models need."""
        return self._ext_backend.autocast() or super().autocast_smart_context_manager(*args, **kwargs)

    # --- what a resumed run takes from its checkpoint ---------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target = self.model if model is None else model
        if not load_weights(target, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._ext_rng_made_up is not None:  # the evaluation that a stop gave up comes between
            restore_rng(self._ext_rng_made_up)

    def _ext_evaluate_pending(self) -> None:
        """Does what the evaluation that a stop interrupted would have done: logs, callbacks, best checkpoint, save.

        With the random state in which it would have begun. A stop gives it up again; it is then still pending.
        """
        super()._load_rng_state(str(self._ext_resumer.resumed.folder))
        self._ext_stopper.load(False)
        metrics = self._evaluate(self._trial, self._ext_stopper.ignore_keys)
        if self._ext_stopper.evaluation_pending:
            return
        self._ext_rng_made_up = capture_rng(self.args.device)
        is_best = self._determine_best_metric(metrics, self._trial)
        if is_best or self.args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST):
            self._save_checkpoint(self.model_wrapped, self._trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:  # transformers 5.23 trains one more step in a run resumed at its last
            return
        self._ext_begin_order(**kwargs)
        super()._run_epoch(*args, **kwargs)

    def _ext_begin_order(self, *, train_dataloader: Any, epoch: int, **kwargs: Any) -> None:
        is_continued = kwargs["resume_from_checkpoint"] is not None and epoch == kwargs["epochs_trained"]
        dropped = kwargs["steps_trained_in_current_epoch"] if is_continued else None
        if dropped and find_override(self, "_get_train_sampler", "get_train_dataloader"):
            logger.warning(
                "The order of rows is the class's own: where it is drawn from generators that nobody seeds, this epoch "
                "goes on in another order."
            )
        base = base_of(train_dataloader)
        if isinstance(getattr(base, "batch_sampler", None), NumberedBatches):
            base.batch_sampler.epoch = epoch + 1  # of a loader that Accelerate did not prepare, nobody else
        self._ext_parts.loaders.begin_epoch(self.state.global_step, dropped)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; a last batch of rows that another process has is marked as such."""
        self._ext_parts.workers.note(epoch_iterator)
        marked = self._ext_parts.loaders.mark_repeated(epoch_iterator, self.accelerator.gradient_state)
        return super().get_batch_samples(marked, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return super()._get_num_items_in_batch(countable(batch_samples, self._ext_decided_loss()), device)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in Trainer; where memory does not suffice and `oom_policy` says so, in parts."""
        parts, compute = self._ext_parts, super().training_step
        if self.is_in_train:
            parts.first_step.see(inputs)
        if not (parts.oom_policy.is_on and self.is_in_train):  # else a loop of the user's own
            return parts.nan_guard.see_loss(compute(model, inputs, *args, **kwargs))
        *before, loss = parts.oom_policy.compute(inputs, lambda batch: compute(model, batch, *args, **kwargs))
        if before:
            parts.nan_guard.see_again(before)
        return parts.nan_guard.see_loss(loss)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As in Trainer; positions in tables of embeddings become their rows."""
        return super()._prepare_inputs(self._ext_parts.embedder.rows(inputs))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; rows that another process trains on count nothing."""
        if isinstance(inputs, RepeatedRows):
            return self.compute_loss(model, dict(inputs), *args, **kwargs) * 0.0
        inputs = self._ext_decided_loss().add_decoder_ids(inputs)
        if model.training:
            compute = partial(super().compute_loss, model)
            self._ext_parts.first_step.check_share(inputs, compute, kwargs.get("num_items_in_batch"))
            self.throughput.see_labels(inputs.get("labels"))  # which Trainer may take out of them
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self._ext_backend.carry_not_finite(loss, model.training)

    def _ext_decided_loss(self) -> DecidedLoss:
        """Asked for every batch, since a method can be assigned at any time. Cost: 10 microseconds."""
        return self._ext_losses.decide(self.model, self.label_smoother is not None, find_override(self, *TRAINING_LOSS))

    @property
    def compute_loss_func(self) -> Any:
        """What was given or assigned; else the exact loss where it is used; else None, as in Trainer."""
        return self._ext_losses.given if self._ext_losses.is_given else self._ext_decided_loss().function

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        if "_ext_losses" in vars(self):  # what is assigned before, Trainer's constructor replaces
            self._ext_losses.give(function)

    def loss_counts_items(self) -> bool:
        """Whether the loss is a sum over items by their number in the step, so that batches may vary in size."""
        return self._ext_losses.counts_items(self._ext_decided_loss())

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return self._ext_parts.nan_guard.see_norm(norm)

    # --- what is due after a step -----------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        log_save_evaluate = super()._maybe_log_save_evaluate

        def due() -> Any:
            log_save_evaluate(*args, **kwargs)
            return self.control

        self._ext_stopper.do_due(due, self.state, self.control)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; before a training loss is shown, the weights are checked, whatever the loss is.

        Under `logging_nan_inf_filter` that of a step that went wrong reads 0.0. With an evaluation's metrics goes what
        the watchers have to say of it.
        """
        if "loss" in logs:
            self._ext_saver.check_finite()
        added = self._ext_evaluator.watch(logs, self.state, self.control) if self.is_in_train else {}
        with extended(logs, added):
            self.throughput.extend_logs(logs, self.args, self.state)  # before any other callback sees the values
            super().log(logs, start_time)
            self.throughput.resume()

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if self._ext_stopper.is_resumed and skip_scheduler:
            return {}  # of `eval_on_start`, which transformers 5.23 would do, and log, once more in a continued run
        before = capture_rng(self.args.device)  # one that is given up is as if it had not begun
        with self._ext_stopper.interruptible(self._ext_now(), self._ext_evaluator.watchers):
            self._ext_evaluator.forget_left_out()
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
            full = self._ext_evaluator.finish_left_out(self._ext_means(), self._ext_now())
            if full is not None:  # a callback has just ended the run
                self.log(full)
                metrics.update(full)
                self._report_to_hp_search(trial, self.state.global_step, metrics)
            return metrics
        restore_rng(before)
        self._ext_stopper.hold_back(self.control)  # a callback may have put another one in the place of that of before
        return {}

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in Trainer; see `Evaluator`. Other rows than the run's own are looked at in full."""
        with self._ext_evaluator.looking_at(eval_dataset, self.eval_dataset):
            return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in Trainer; with `eval_subset`, `dataloader` is of the subset, and the rest follows where due."""
        given = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        with self._ext_parts.workers.naming_deaths():
            if not (self.is_in_train and self._ext_evaluator.looks_at_own):
                knowing = self._ext_evaluator.for_all_rows(self.compute_metrics)
                return self._ext_one_pass(dataloader, given, knowing)[0]
            return self._ext_evaluator.run(dataloader, given, self._ext_means(), self._ext_now())

    def _ext_one_pass(
        self, loader: Any, given: tuple[Any, ...], stand_in: Any = None
    ) -> tuple[EvalLoopOutput, float | None]:
        """Trainer's loop; of how many items its loss is the mean, None where it is Trainer's."""
        self._ext_parts.repeatable.adopt(loader, is_training=False)
        prepared = self._ext_backend.prepare_to_evaluate(self.model, self._ext_make_optimizer)
        if prepared is not None:
            self.model, self.optimizer = prepared
            self.model_wrapped = self.model
        loop, instead = super().evaluation_loop, {} if stand_in is None else {"compute_metrics": stand_in}
        is_left = given[0] != "Prediction" and given[2] is None and self.preprocess_logits_for_metrics is None
        if is_left and gives_states(self.model) and not find_override(self, "prediction_step"):
            instead["preprocess_logits_for_metrics"] = without_states
        evaluating = self._ext_backend.evaluating(self.model)
        with replaced(self, **instead), unfiltered(self.args), evaluating, self._ext_losses.rows() as rows:
            output = loop(loader, *given)
        self._ext_losses.finish(rows, output.metrics or {}, given[-1])
        return output, self._ext_losses.num_items

    def _ext_make_optimizer(self) -> Any:
        self.create_optimizer()
        return self.optimizer

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As in Trainer; keeps the loss of each row, where it is known."""
        loss, override = self._ext_decided_loss(), find_override(self, *EVALUATION_LOSS)
        predict = partial(super().prediction_step, model, inputs, ignore_keys=ignore_keys, **kwargs)
        generates = getattr(self.args, "predict_with_generate", False)  # predictions are then no logits
        if generates or not self._ext_losses.wants_rows(loss, self.label_names, override, ignore_keys):
            return predict(prediction_loss_only=prediction_loss_only)
        value, logits, labels = predict(prediction_loss_only=False)
        if value is not None:
            self._ext_losses.keep(loss, logits, inputs, labels, self.accelerator.gather_for_metrics)
        return (value, None, None) if prediction_loss_only else (value, logits, labels)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in Trainer, on all rows and of numbers: an evaluation of the subset alone makes nothing the best."""
        decisive = None if self._ext_stopper.evaluation_pending else self._ext_evaluator.decisive(metrics)
        key = self._ext_evaluator.best_metric_key
        if decisive is None or not can_be_best(key, decisive, self.state.global_step):
            return False
        is_best = super()._determine_best_metric(decisive, trial)
        if is_best:
            self._ext_evaluator.note_best(metrics, self._ext_means(), self._ext_now())
        return is_best

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        super()._report_to_hp_search(trial, step, self._ext_evaluator.objective(metrics, self.state, self.control))

    # --- a checkpoint -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:  # a hyperparameter search has a folder per trial and resumes nothing
            super()._save_checkpoint(model, trial)
        else:
            self._ext_saver.save(partial(super()._save_checkpoint, model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        return self._ext_saver.staging_root or super()._get_output_dir(trial)

    # --- a model folder ---------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer; of weights that are spread over processes, whole ones, whatever checkpoints hold.

        To be called by all processes; the main one writes. The push that follows runs beside the script; `push_to_hub`
        or `end` says how it went.

        Raises:
            FolderError: another process's run has the output folder.
            DiskFailure: the disk is full, read-only or broken; the folder's model is not complete.
        """
        own = os.path.realpath(self.args.output_dir)
        needs_folder = not _internal_call and os.path.realpath(output_dir or own) == own
        with hold_folders(self.args, together=False) if needs_folder else nullcontext():
            self._ext_export(output_dir, _internal_call)
            if self.args.push_to_hub and not _internal_call and output_dir in (None, self.args.output_dir):
                self._ext_pusher.push_model("Model save", blocking=False)

    def _ext_export(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call:  # for a checkpoint
            if self._ext_backend.is_spread and not self._ext_backend.is_zero:  # accelerate writes the weights
                self._ext_save_companions(Path(str(output_dir)))
            else:
                super().save_model(output_dir, _internal_call)
            return
        whole = self._ext_backend.whole_weights(self.model)
        with self._ext_parts.exporter.exporting(self.model, output_dir, self.state):
            if whole is None:
                super().save_model(output_dir, _internal_call=True)  # else it pushes
            else:
                self._save(output_dir, whole)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        state_dict = self._ext_backend.weights_to_save(state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        if not can_save_itself(self.model):
            super()._save(str(folder), state_dict)
            self._ext_parts.exporter.drop_pickle(folder)
        elif self.args.should_save:
            save = save_checkpoint_weights if self._ext_saver.is_staged(folder) else save_pretrained
            save(self.model, folder, state_dict)
        self._ext_save_companions(folder)

    def _ext_save_companions(self, folder: Path) -> None:
        if self.args.should_save:
            self._ext_parts.exporter.save_companions(folder, self.processing_class, self.data_collator)

    def save_merged(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model with its LoRA adapters merged into the weights; the folder loads without PEFT.

        `trainer.model` keeps its adapters. Predictions are the same up to rounding. Cost: memory for a second copy.

        Raises:
            ArgumentError: the model has no adapters, or its weights are spread over processes.
            DiskFailure: as `save_model`.
        """
        self._ext_parts.exporter.save_merged(self.model, folder, self.state, self.processing_class, self.data_collator)

    # --- the end of a run -------------------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any) -> Any:
        self._ext_saver.finish()
        self._ext_saver.check_finite()
        state, saver = self.state, self._ext_saver
        best = self._ext_team.on_main(saver.retention.best_step)  # one answer for all: copies come and go
        path = self._ext_team.on_main(partial(saver.store.locate, best))
        state.best_model_checkpoint = None if path is None else str(path)
        if self.args.load_best_model_at_end and state.best_global_step != best:
            logger.warning(
                "No checkpoint of the best step, %s, was saved: %s.",
                state.best_global_step,
                "the last weights are kept" if best is None else f"checkpoint-{best}, the best one that was, is taken",
            )
        # With a limit of 1, Trainer now deletes every other `checkpoint-*` folder, foreign ones too.
        with replaced(self.args, save_total_limit=None):
            output = super()._finalize_training(*args)
        if self.args.push_to_hub and self._ext_team.writes:
            saver.retention.rotate()  # what stayed only while it was sent
        return output

    def _load_best_model(self) -> None:
        if self._ext_stopper.reason is not None:
            return
        self._ext_team.on_main(self._ext_verify_best)
        logger.info("Loading the best model, of %s.", self.state.best_model_checkpoint)
        if self._ext_backend.is_spread:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _ext_verify_best(self) -> None:
        stored = self.checkpoints.open(str(self.state.best_model_checkpoint))
        if stored is not None:
            check_unlisted(stored)

    def end(self) -> None:
        """As in Trainer, for all trainers of the process, once the push under way has ended.

        Ends data workers that live on, and switches back what the plan switched in the process and in the model. To be
        called by all processes, once each; waits for the slowest. `trainer.model` stays, but of several processes none
        can train or evaluate afterwards: they have one process group, which goes.

        Raises:
            HubError: on all processes: the last push failed, and no later one succeeded.
        """
        failure = self._ext_pusher.close() if self.args.push_to_hub else None
        self._ext_planned.restore()
        self._ext_parts.workers.end(self.accelerator._dataloaders)
        release_group()
        super().end()
        if failure is not None:
            raise HubError(failure)

    def close(self) -> None:
        """Lets go of what this trainer holds, while others of the process go on: its processes stay connected.

        For a trainer inside a run, such as one head of several; `end` comes after the last of them. Never waits.
        """
        self._ext_planned.restore()
        self._ext_parts.workers.end(self.accelerator._dataloaders)
        self.let_go()

    def let_go(self) -> None:
        """Releases the wrapped model, and all that the Accelerator has prepared."""
        self.model_wrapped = self.model
        self.accelerator.free_memory()

    # --- the Hub ----------------------------------------------------------------------------------------------------

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._ext_saver.staging_root is None:  # else the checkpoint has no name yet
            self._ext_pusher.push_checkpoint(Path(checkpoint_folder))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves and pushes the model with what else may be shared, and compares what arrived with what was sent.

        To be called by all processes.

        Args:
            commit_message, token, revision, private: as in Trainer; None for what the arguments say.
            blocking: False pushes beside the script; `end` says how it went.
            kwargs: for `create_model_card`, where `output_dir` has no card yet.

        Returns:
            The commit, on all processes; None with `blocking=False`.

        Raises:
            HubError: on all processes: it was refused or did not arrive. The message says what repeats it.
            DiskFailure: no room to save the model.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        with hold_folders(self.args, together=False):
            self._ext_pusher.save_with_card(self._ext_export, kwargs)
        return self._ext_pusher.push_model(commit_message, blocking, token, revision, private)

    def _ext_make_batch(self, collator: Any, rows: list[Any]) -> Any:
        return self._prepare_inputs(self._get_collator_with_removed_columns(collator)(rows))

    # --- embeddings, for callers who may override each --------------------------------------------------------------

    def embed_dataset(self, dataset: Any) -> EmbeddedDataset:
        """`dataset` with its frozen inputs as positions in embedding tables; see `Embedder.embed`."""
        return self._ext_parts.embedder.embed(dataset, self._ext_encoding(), self.fill_embedding_store)

    def fill_embedding_store(self, name: str, sequences: Sequence[str]) -> EmbeddingStore:
        """The store of input `name` with all `sequences` (pairs joined by `|`) in it; all processes share the work."""
        return self._ext_parts.embedder.fill(name, sequences, self._ext_encoding())

    def encode_distinct(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, through the cache where it is on: (n, width), float32, on the CPU."""
        return self._ext_parts.embedder.encode(name, sequences, self._ext_encoding(), self.fill_embedding_store)

    def encode_sequences(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, computed here and now: (n, width), float32. Parts of a pair are joined by `|`.

        Encoders that train compute as they do in training: under its autocast.
        """
        return self._ext_encoding().compute(name, sequences)

    def embedding_key(self, name: str) -> dict[str, Any]:
        """Everything that decides the value of all embeddings of input `name`; how long ones are cut is known apart."""
        return self._ext_encoding().describe(name)

    def fit_scaling(self) -> None:
        """Gives the model the scale of labels and embeddings; see `hf_ext.training.scaling.fit_scaling`."""
        embed = self.embed_dataset if self._ext_parts.embedder.is_on else None
        columns, optional = self.data_collator.columns, self._ext_encoding().optional_inputs
        fit_scaling(self.model, self.train_dataset, columns, self.encode_distinct, self.args.seed, embed, optional)

    # --- what is handed to the parts --------------------------------------------------------------------------------

    def _ext_now(self) -> Training:
        return Training(
            self.model,
            self.model_wrapped,
            self.optimizer,
            self.lr_scheduler,
            self.accelerator,
            self.state,
            self.control,
            self.callback_handler,
        )

    def _ext_means(self) -> Means:
        return Means(self.eval_dataset, self.compute_metrics, self._ext_one_pass, self._ext_make_eval_loader)

    def _ext_make_eval_loader(self, dataset: Any, rows: Any = None) -> Any:
        given = {"sampler_fn": self._get_eval_sampler, "rows": rows}
        return self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, **given)

    def _ext_encoding(self) -> Encoding:
        return Encoding(
            self.model,
            self.data_collator,
            self.args.device,
            self.accelerator.autocast,
            partial(self._ext_backend.encoding, self.model),
            self._ext_planned.applied("cpu_matmul"),
            self.encode_sequences,
            self.embedding_key,
        )

    # --- what a run says of itself ----------------------------------------------------------------------------------

    plan = property(attrgetter("_ext_planned.plan"), doc="What was decided of each speed-up, and what came of it.")
    # Without anything asked for that Trainer lacks, a run leaves in its output folder what Trainer's leaves.
    keeps_records = property(attrgetter("_ext_planned.keeps_records"), doc="Whether `plan.json` and the like are kept.")
    checkpoints = property(attrgetter("_ext_saver.store"), doc="The store that training saves into.")
    throughput = property(attrgetter("_ext_parts.throughput"), doc="Live rates of the run.")
    run_clock = property(attrgetter("_ext_parts.run_clock"), doc="How long the run has trained, over all its sessions.")
    evaluation_pending = property(
        attrgetter("_ext_stopper.evaluation_pending"), doc="Whether a stop left one to make up."
    )
    stopping_decisions = property(attrgetter("_ext_parts.early_stopping.decisions"), doc="Those of early stopping.")
    collapse_alarms = property(attrgetter("_ext_parts.collapse_alarm.alarms"), doc="Every alarm said while training.")
    profile = property(attrgetter("_ext_parts.profiling.found"), doc="What `torch_profiler` found, or None.")
    compared_evaluation = property(attrgetter("_ext_evaluator.compared"), doc="The last `Evaluation`, or None.")

    @property
    def stop_reason(self) -> str | None:
        """Why training stopped before its end; None where it did not."""
        return None if self._ext_stopper.reason is None else self._ext_stopper.reason.text

    @property
    def evaluation_record(self) -> EvaluationRecord:
        """Counts and seconds of the run; resuming replaces the object."""
        return self._ext_evaluator.record(self.callback_handler.callbacks)

    def evaluation_facts(self) -> dict[str, Any]:
        """What evaluations of the run looked at and took, for JSON; see `EvaluationRecord.facts`."""
        return self.evaluation_record.facts()

    def checkpoint_sizes(self) -> Sizes:
        """Upper bounds of what one checkpoint takes before anything is stripped from it."""
        return self._ext_saver.retention.sizes()

    def check_disk_budget(self) -> None:
        """Raises ArgumentError for a budget that cannot hold what will be written, or decides to store less."""
        self._ext_saver.retention.check()

    def data_position(self) -> dict[str, Any] | None:
        """Where the training stream stands after the last optimizer step, for JSON; None for other data."""
        return self._ext_parts.loaders.position(self.state.global_step)

    def choose_eval_rows(self) -> None:
        """Chooses the subset of every evaluation set, so that what is wrong with one is said before training."""
        self._ext_evaluator.choose_rows(self._ext_means())

    def early_stopping_bytes(self) -> int:
        """Upper bound of the arrays that early stopping adds to a checkpoint."""
        self._ext_parts.early_stopping.look_at(self.eval_dataset)
        return self._ext_parts.early_stopping.num_bytes()


class FastSeq2SeqTrainer(FastTrainer, Seq2SeqTrainer):
    """`FastTrainer` for models that generate: evaluates and predicts as `transformers.Seq2SeqTrainer` does."""


class Events(TrainerCallback):
    """What Trainer's events mean for several parts at once, or need of the trainer itself. Comes after their own."""

    def __init__(self, trainer: FastTrainer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer has made or restored its state, and has set its counters to zero."""
        trainer, parts = self._trainer, self._trainer._ext_parts
        trainer.choose_eval_rows()  # says what is wrong with them before anything is trained
        parts.stopper.end_if_finished(state, control, trainer.callback_handler.callbacks)
        begin = self._begin_on_disk if args.should_save else None
        trainer._ext_team.load_together(begin, trainer._ext_saver.describe_failure)  # a refusal is one on all processes
        trainer._ext_saver.check_finite()  # weights that are not finite would make all others so
        self._go_on(state)
        if trainer._ext_stopper.evaluation_pending:  # last: it is part of the run that goes on
            trainer._ext_evaluate_pending()

    def _go_on(self, state: Any) -> None:
        """What Trainer does not take from a checkpoint: states of parts, and arguments that were allowed to change."""
        trainer, resumed = self._trainer, self._trainer._ext_resumer.resumed
        for part in trainer._ext_parts.carried:
            part.load(None if resumed is None else resumed.state_of(part.name))
        if resumed is None:
            return
        if losses := resumed.state_of("losses"):  # since the last log
            trainer._tr_loss.fill_(losses["unlogged"])
            trainer._globalstep_last_logged = losses["last_logged_step"]
        state.compute_steps(trainer.args, state.max_steps)  # Trainer goes on with the intervals of the checkpoint
        trainer._ext_resumer.apply_changes(trainer.optimizer, trainer.lr_scheduler, trainer._ext_made)
        if resumed.allowed & {"metric_for_best_model", "greater_is_better"}:
            state.best_metric = state.best_global_step = None
            trainer._ext_saver.retention.best_saved = None

    def _begin_on_disk(self) -> None:
        """A resumed run first finishes a rotation cut short; the budget is checked once the optimizer exists."""
        retention = self._trainer._ext_saver.retention
        retention.rotate()
        self._trainer.checkpoints.begin_copies(retention.best_step())
        self._trainer.check_disk_budget()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What others had to write into the checkpoint stands there."""
        self._trainer._ext_saver.finish()


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor by their names, those without one in the order of Trainer's.

    By name, because a class between this one and Trainer may have another order.
    """
    if len(args) > len(PARAMETERS):
        raise TypeError(f"{len(args)} arguments by position: Trainer takes {', '.join(PARAMETERS)}.")
    named = dict(zip(PARAMETERS, args))
    if twice := named.keys() & kwargs.keys():
        raise TypeError(f"Given twice, by position and by name: {', '.join(sorted(twice))}.")
    return {**named, **kwargs}
