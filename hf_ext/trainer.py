"""`FastTrainer`: one override per method of Trainer that hf_ext takes part in, in the order of a run.

Each hands over to the parts of `hf_ext/training` and `hf_ext/saving`, in the order in which they must act; where an
order has a reason, it stands beside it. `hf_ext/parts.py` makes them.

Private names of ours begin with `_ext_`: the others are Trainer's, and those of users' subclasses meet neither.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import optimizer
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from .checkpoints import CheckpointStore, Sizes, load_weights, lock_folders
from .data import RepeatedRows
from .embeddings import EmbeddingStore
from .errors import DiskFailure, NotFiniteError, RunEnded, StoppedForGood, TrainingStopped, outliving_readers
from .files import Json, StrPath
from .hub import HubError
from .models import replaced
from .parts import Parts, make_parts
from .plan import Plan
from .processes import release_group, share_group
from .reporting import RunClockCallback, ThroughputCallback
from .text import messages_above_bars, show_live
from .training import (
    BATCHES,
    EVALUATION_LOSS,
    Embedded,
    EmbeddingCache,
    Given,
    Losses,
    LossFunction,
    Rows,
    Stopper,
    check_optimizer,
    check_training,
    encode_sequences,
    find_batch_size,
    find_override,
    find_own_loss,
    finish_optimizer,
    keep_from_workers,
    name_dead_workers,
    plan_run,
    seed_process,
    take_rows,
)
from .training_args import FastTrainingArguments, complete_arguments

logger = logging.getLogger(__name__)

PARAMETERS = tuple(inspect.signature(Trainer.__init__).parameters)[1:]


class FastTrainer(Trainer):
    """`transformers.Trainer` with a plan: takes the same arguments, plus `plan`; use it the same way.

    Where a speed-up is applied, rows are text or data workers would live on, `trainer.args` is a copy with what was set
    for it: a second trainer made from the caller's `args` does not scale a learning rate that is scaled already. Else
    it is the caller's; of plain `TrainingArguments`, too. Trainers of other libraries go in front:
    `class Mine(SFTTrainer, FastTrainer)`.

    Attributes:
        test_dataset: rows that a script scores at the end, if it says so here; a run is not continued with others, as
            with those of training and evaluation.

    Raises (from the constructor):
        PlanRefused: a request would do something else than asked on this machine, model or data.
        ArgumentError: arguments that contradict each other.
    """

    model: Any  # of any class; Trainer declares these for type checkers alone
    data_collator: Any
    eval_dataset: Any
    hub_model_id: Any
    test_dataset: Any = None

    def __init__(self, *args: Any, plan: Plan | None = None, **kwargs: object):
        given = _by_name(args, kwargs)
        model_init = given.get("model_init") if given.get("model") is None else None
        if model_init is not None:  # the plan is for the model that it makes
            self.model_init = model_init
            given["args"] = complete_arguments(given.get("args"))
            seed_process(given["args"])
            given["model"] = super().call_model_init()
        own_loss = find_own_loss(self, given.get("compute_loss_func"))
        self._ext_planned = plan_run(given, plan, own_loss, find_override(self, *BATCHES))
        run = self._ext_planned.run
        self._ext_args = run.args
        self._ext_losses = Losses(self)  # which Trainer's constructor asks for
        with self._ext_planned.applying():  # before Trainer reads arguments, and puts the model on its device
            with replaced(run.args, push_to_hub=False):  # Trainer would open the repository, and a public one
                model = {"model": run.model}  # a speed-up may have wrapped it
                if model_init is not None:
                    model = {"model": None, "model_init": lambda: run.model}
                super().__init__(**{**given, "args": run.args, **model})
            if model_init is not None:
                self.model_init = model_init
            parts = self._ext_parts
            if self.args.push_to_hub:
                parts.pusher.open()
            parts.backend.configure()
            self._ext_listen()
        self._ext_losses.warn_of_means()
        share_group(self)
        run.release_with(self)
        self._ext_planned.save()

    @property
    def args(self) -> FastTrainingArguments:
        """The arguments; others may be assigned at any time, and count from then on."""
        return self._ext_args

    @args.setter
    def args(self, args: TrainingArguments | None) -> None:
        self._ext_args = complete_arguments(args)
        if "_ext_planned" in vars(self):  # a subclass may assign before the constructor
            self._ext_planned.run.args = self._ext_args

    @cached_property
    def _ext_parts(self) -> Parts:
        """Made when first asked for, since a class behind this one may do so in its constructor."""
        return make_parts(
            self,
            self._ext_planned,
            self._ext_losses,
            one_pass=self._ext_one_pass,
            make_loader=self._ext_make_eval_loader,
            save=lambda: self._save_checkpoint(self.model_wrapped, self._trial),
        )

    def _ext_listen(self) -> None:
        show_live(self.callback_handler.callbacks)
        for part in self._ext_parts.callbacks():
            self.add_callback(part)
        self.add_callback(Events(self))  # what comes after all of theirs

    # --- the beginning of a run -------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains as Trainer does.

        `resume_from_checkpoint` may also be "auto", and where it is None, `args.resume` decides.

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
        if self.model_init is not None:
            self._ext_make_model(trial)
        has_own_loader = find_override(self, "get_train_dataloader") is not None
        check_training(self.args, None if has_own_loader else getattr(self, "train_dataset", None), self.model)
        with lock_folders(self.args):  # before anything in it is looked at
            self._ext_parts.saver.open_folders()
            # Once all others have said what is due.
            self.callback_handler.callbacks.sort(key=lambda callback: isinstance(callback, Stopper | Events))
            self._ext_planned.save()  # the folder may be another one than when it was planned
            folder = self._ext_parts.resumer.begin(resume_from_checkpoint, is_trial=trial is not None)
            train = partial(super().train, folder, trial, ignore_keys_for_eval)
            try:
                output = self._ext_train_and_copy(train, folder)
            except NotFiniteError as error:
                if trial is None:
                    raise
                logger.error("This trial is given up: %s", error)
                self.objective: Any = math.nan  # of which a search knows that the trial failed, and goes on
                output = TrainOutput(self.state.global_step, math.nan, {})
            if self._ext_parts.stopper.reason is not None:
                self._ext_parts.team.wait_for_everyone()  # torchrun ends the others as soon as one has ended
                raise self._ext_stop()
        return output

    def _ext_make_model(self, trial: Any) -> None:
        """Makes the model by `model_init`, as Trainer's `train` does, before anything is compared or embedded."""
        self.model = self._ext_planned.renew(partial(self.call_model_init, trial))
        self.optimizer = None
        self.lr_scheduler = None
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)
        self.model_wrapped = self.model
        parts = self._ext_parts
        parts.embedder = EmbeddingCache(self, parts.team, parts.backend, self._ext_planned)  # encoders may be others

    def _ext_stop(self) -> TrainingStopped:
        saved = f"{self.stop_reason}: saved checkpoint-{self.state.global_step} and stopped."
        why_not = self._ext_parts.resumer.why_not_again
        if why_not is not None:
            return StoppedForGood(f"{saved} {why_not}")
        return TrainingStopped(f"{saved} The same command continues from it.")

    def _ext_train_and_copy(self, train: Callable[[], TrainOutput], folder: str | None) -> TrainOutput:
        """Trains; with `local_checkpoint_dir`, returns when the last checkpoint is in `output_dir`."""
        try:
            self._ext_parts.embedder.begin()  # while the encoders are in memory; scales are drawn from the tables
            find_batch_size(self, self._ext_planned, self._ext_parts.team, folder)
            with self._ext_around_training(folder):
                # Which hears of all that died, and not while all else is left.
                output = name_dead_workers(train, self.checkpoints, self.args.dataloader_num_workers)
        except RunEnded:
            self._ext_parts.saver.finish_copies()
            raise
        lacking = self._ext_parts.saver.finish_copies()
        if lacking is not None:
            raise DiskFailure(lacking)
        return output

    @contextmanager
    def _ext_around_training(self, folder: str | None) -> Iterator[None]:
        """Ends what has to end after Trainer's own `train`, however that ends."""
        with ExitStack() as around:
            around.enter_context(outliving_readers())
            around.callback(self._ext_parts.saver.leave)
            around.callback(self._ext_parts.profiler.leave)
            around.enter_context(replaced(self, model_init=None))  # the model is made
            # Which shows the mean of other steps in place of a loss that is not finite, and waits for the device.
            around.enter_context(replaced(self.args, logging_nan_inf_filter=False))
            around.enter_context(self._ext_parts.stopper.during_training())
            # Trainer would evaluate, and log, once more in a continued run.
            around.enter_context(replaced(self.args, eval_on_start=self.args.eval_on_start and folder is None))
            around.enter_context(messages_above_bars(self.callback_handler.callbacks))
            # Accelerate 1.15 searches the disk for a package twice a step
            # (https://github.com/huggingface/accelerate/pull/2695). Remove when its optimizer searches once.
            around.enter_context(replaced(optimizer, is_lomo_available=cache(optimizer.is_lomo_available)))
            yield

    # --- data -------------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Makes the loader as Trainer does; during training with `eval_subset`, of the subset."""
        loader = self._ext_parts.evaluator.loader()
        return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
        rows: Sequence[int] | None = None,
    ) -> DataLoader:
        if self._ext_parts.embedder.is_on and hasattr(dataset, "__len__"):
            dataset = self.embed_dataset(dataset)
            self.model.release_encoders()
        if rows is not None:  # taken after that: one table for all parts of a set
            dataset = take_rows(dataset, rows)
        make = partial(super()._get_dataloader, description=description, batch_size=batch_size)
        if is_training:
            return keep_from_workers(self._ext_parts.loaders.train(dataset, batch_size, sampler_fn, make))
        return keep_from_workers(self._ext_parts.loaders.evaluate(dataset, partial(make, sampler_fn=sampler_fn)))

    # --- model, optimizer, schedule ---------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: object) -> torch.optim.Optimizer:
        """Creates the optimizer as Trainer does.

        Where the plan says so, with Muon, groups for encoders, or on the host.
        """
        if self.is_in_train:  # accelerate wraps both next
            self._ext_parts.backend.begin_preparing()
        is_new = self.optimizer is None
        made = super().create_optimizer(*args, **kwargs)
        finished = finish_optimizer(made, is_new, self.args, self.model, self.plan)
        if finished is not made:
            self.optimizer = finished
        check_optimizer(self.args, finished)
        self._ext_parts.resumer.remember(finished)
        return finished

    # --- what a resumed run takes from its checkpoint ---------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = self.model if model is None else model
        if not load_weights(target, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: object) -> None:
        if self.control.should_training_stop:  # transformers 5.24 trains one more step in a run resumed at its last
            return
        super()._run_epoch(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        self._ext_parts.loaders.mark_repeated(batch_samples)
        with replaced(self._ext_losses, at_hand=self._ext_losses.decide()):
            return super()._get_num_items_in_batch(self._ext_losses.countable(batch_samples), device)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Takes a training step as Trainer does; where memory does not suffice, with fewer rows at a time."""
        if not self.is_in_train:  # a loop of the user's own
            return super().training_step(model, inputs, *args, **kwargs)
        parts = self._ext_parts
        parts.checks.see(inputs)
        with replaced(self._ext_losses, at_hand=self._ext_losses.decide()):  # which is asked for four times in there
            step = super().training_step
            loss = parts.halving.compute(model, inputs, lambda batch: step(model, batch, *args, **kwargs))
        parts.nan_guard.losses.append(loss)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Computes the loss as Trainer does; rows that another process trains on count nothing."""
        if isinstance(inputs, RepeatedRows):
            return self.compute_loss(model, dict(inputs), *args, **kwargs) * 0.0
        inputs = self._ext_losses.decide().add_decoder_ids(inputs)
        labels = inputs.get("labels")
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if isinstance(loss, tuple) and not find_override(self, *EVALUATION_LOSS):
            self._ext_losses.keep(loss[1], labels, inputs.get("bounds"))
        return self._ext_parts.backend.carry_not_finite(loss, model.training)

    @property
    def compute_loss_func(self) -> LossFunction | None:
        """What was given or assigned; else the exact loss where it is used; else None, as in Trainer."""
        return self._ext_losses.decide().function

    @compute_loss_func.setter
    def compute_loss_func(self, function: LossFunction | None) -> None:
        if "_ext_losses" in vars(self):  # what is assigned before, Trainer's constructor replaces
            self._ext_losses.given = function

    def loss_counts_items(self) -> bool:
        """Returns whether the loss is a sum over items by their number in the step: batches may vary in size."""
        return self._ext_losses.counts_items()

    def _get_grad_norm(self, *args: Any, **kwargs: object) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return self._ext_parts.nan_guard.see_norm(norm)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as Trainer does; before a training loss is shown, the weights are checked, whatever the loss is.

        Under `logging_nan_inf_filter` that of a step that went wrong reads 0.0.
        """
        if "loss" in logs:
            self._ext_parts.saver.check_finite()
        self.throughput.extend_logs(logs, self.args, self.state)  # before any other callback sees the values
        super().log(logs, start_time)
        self.throughput.resume()

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates as Trainer does; see `Evaluator`. Other rows than the run's own are looked at in full."""
        return self._ext_parts.evaluator.evaluate(
            eval_dataset, partial(super().evaluate, eval_dataset, *args, **kwargs)
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates as Trainer does.

        With `eval_subset`, `dataloader` is of the subset, and all rows follow where due.
        """
        given = description, prediction_loss_only, ignore_keys, metric_key_prefix
        run = partial(self._ext_parts.evaluator.run, dataloader, given)
        return name_dead_workers(run, self.checkpoints, self.args.dataloader_num_workers)

    def _ext_one_pass(self, loader: DataLoader, given: Given, compute_metrics: object) -> EvalLoopOutput:
        """Runs Trainer's loop."""
        prepared = self._ext_parts.backend.prepare_to_evaluate(self.model, self._ext_make_optimizer)
        if prepared is not None:
            self.model, self.optimizer = prepared
            self.model_wrapped = self.model
        loop = super().evaluation_loop
        evaluating = self._ext_parts.backend.evaluating(self.model)
        with replaced(self, compute_metrics=compute_metrics), evaluating, self._ext_losses.rows(given[2]) as rows:
            output = loop(loader, *given)
        self._ext_losses.finish(rows, output.metrics or {}, given[-1])
        return output

    def _ext_make_optimizer(self) -> Any:
        self.create_optimizer()
        return self.optimizer

    # --- a checkpoint -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save = replaced(self.args, push_to_hub=False)(partial(super()._save_checkpoint, model, trial))
        if trial is not None:  # a hyperparameter search has a folder per trial, resumes nothing and is not pushed
            save()
        else:
            self._ext_parts.saver.save(save)

    def _get_output_dir(self, trial: Any) -> str:
        return self._ext_parts.saver.staging_root or super()._get_output_dir(trial)

    # --- a model folder ---------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as Trainer does, but always writes full (unsharded) weights.

        To be called by all processes; the main one writes. The push that follows runs beside the script; `push_to_hub`
        or `end` says how it went.

        Raises:
            FolderError: another process's run has the output folder.
            DiskFailure: the disk is full, read-only or broken; the folder's model is not complete.
        """
        own = os.path.realpath(self.args.output_dir)
        needs_folder = not _internal_call and os.path.realpath(output_dir or own) == own
        with lock_folders(self.args, together=False) if needs_folder else nullcontext():
            self._ext_export(output_dir, _internal_call)
            if self.args.push_to_hub and not _internal_call and output_dir in (None, self.args.output_dir):
                self._ext_parts.pusher.push_model("Model save", blocking=False)

    def _ext_export(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        backend = self._ext_parts.backend
        exporter = self._ext_parts.exporter
        if _internal_call and backend.is_sharded and not backend.is_zero:  # a checkpoint: accelerate writes the weights
            self._ext_save_companions(Path(str(output_dir)))
            return
        whole = backend.whole_weights()
        with nullcontext() if _internal_call else exporter.exporting(output_dir):
            if backend.is_sharded:
                self._save(output_dir, whole)
            else:
                super().save_model(output_dir, _internal_call=True)  # else it pushes

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if isinstance(self.model, PreTrainedModel | PeftModel):
            if self.args.should_save:
                self._ext_parts.exporter.write(folder, self.model, state_dict, self._ext_parts.saver.is_staged(folder))
            return
        whole = state_dict or self.model.state_dict()
        # Of a plain module in another memory format, which safetensors takes for shared memory.
        super()._save(str(folder), {name: tensor.contiguous() for name, tensor in whole.items()})
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, with `hub_token` in clear
        self._ext_save_companions(folder)

    def _ext_save_companions(self, folder: Path) -> None:
        if self.args.should_save:
            self._ext_parts.exporter.save_companions(folder)

    def save_merged(self, folder: StrPath) -> None:
        """Writes the model with its LoRA adapters merged into the weights; the folder loads without PEFT.

        `trainer.model` keeps its adapters. Predictions are the same up to rounding. Cost: memory for a second copy.

        Raises:
            ArgumentError: the model has no adapters, or its weights are sharded over processes.
            DiskFailure: as `save_model`.
        """
        self._ext_parts.exporter.save_merged(folder)

    # --- the end of a run -------------------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any) -> Any:
        saver = self._ext_parts.saver
        saver.finish()
        saver.check_finite()
        saver.choose_best()
        # With a limit of 1, Trainer now deletes every other `checkpoint-*` folder, foreign ones too.
        with replaced(self.args, save_total_limit=None):
            output = super()._finalize_training(*args)
        if self.args.push_to_hub and self._ext_parts.team.writes:
            saver.retention.rotate()  # what stayed only while it was sent
        return output

    def _load_best_model(self) -> None:
        if self._ext_parts.stopper.reason is not None:
            return
        self._ext_parts.saver.verify_best()
        logger.info("Loading the best model, of %s.", self.state.best_model_checkpoint)
        if self._ext_parts.backend.is_sharded:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def end(self) -> None:
        """Ends all trainers of the process as Trainer does, once the push under way has ended.

        Switches back what the plan switched in the process and in the model. To be called by all processes, once each;
        waits for the slowest. `trainer.model` stays, but of several processes none can train or evaluate afterwards:
        they have one process group, which goes.

        Raises:
            HubError: on all processes: the last push failed, and no later one succeeded.
        """
        failure = self._ext_parts.pusher.close() if self.args.push_to_hub else None
        self._ext_planned.run.restore()
        release_group()
        super().end()
        if failure is not None:
            raise HubError(failure)

    def close(self) -> None:
        """Lets go of what this trainer holds, while others of the process go on: its processes stay connected.

        For a trainer inside a run, such as one head of several; `end` comes after the last of them. Never waits.
        """
        self._ext_planned.run.restore()
        self.release()

    def release(self) -> None:
        """Releases the wrapped model, and all that the Accelerator has prepared."""
        self.model_wrapped = self.model
        self.accelerator.free_memory()

    # --- the Hub ----------------------------------------------------------------------------------------------------

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: object,
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
            self._ext_parts.pusher.open(token=token, private=private)
        with lock_folders(self.args, together=False):
            self._ext_parts.pusher.save_with_card(self._ext_export, kwargs)
        return self._ext_parts.pusher.push_model(
            commit_message, blocking, token=token, revision=revision, private=private
        )

    # --- embeddings, for callers who may override each --------------------------------------------------------------

    def embed_dataset(self, dataset: Rows) -> Embedded:
        """Returns `dataset` with embeddings of its frozen inputs, or states of their residues.

        See `EmbeddingCache.embed`.
        """
        return self._ext_parts.embedder.embed(dataset)

    def fill_store(self, name: str, sequences: Sequence[str], states: torch.dtype = torch.float16) -> EmbeddingStore:
        """Stores the embeddings of input `name`, where the cache is on; see `EmbeddingCache.fill`."""
        return self._ext_parts.embedder.fill(name, sequences, states)

    def encode_distinct(self, name: str, sequences: Sequence[str]) -> Tensor:
        """Encodes input `name`, through the cache where it is on: (n, width), float32, on the CPU.

        Where residues have labels, the states of all of them: (residues, width).
        """
        return self._ext_parts.embedder.encode(name, sequences)

    def encode_sequences(self, name: str, sequences: Sequence[str]) -> Any:
        """Encodes input `name`, computed here and now: (n, width), float32. Parts of a pair are joined by `|`.

        Where residues have labels, a list of the states of each sequence's, (residues, width).
        Encoders that train compute as they do in training: under its autocast.
        """
        device = self.args.device
        autocast = self.accelerator.autocast
        return encode_sequences(self.model, self.data_collator, name, sequences, device, autocast)

    def embedding_key(self, name: str) -> Json:
        """Returns everything that decides the value of all embeddings of input `name`.

        How long ones are cut is known apart.
        """
        return self._ext_parts.embedder.key(name)

    def fit_scaling(self) -> None:
        """Gives the model the scale of labels and embeddings; see `EmbeddingCache.fit_scaling`."""
        self._ext_parts.embedder.fit_scaling()

    # --- what is handed to the parts --------------------------------------------------------------------------------

    def _ext_make_eval_loader(self, dataset: Rows, rows: Sequence[int] | None = None) -> DataLoader:
        size = self.args.eval_batch_size
        return self._get_dataloader(dataset, "Evaluation", size, sampler_fn=self._get_eval_sampler, rows=rows)

    # --- what a run says of itself ----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What was decided of each speed-up, and what came of it."""
        return self._ext_planned.plan

    @property
    def keeps_records(self) -> bool:
        """Whether `plan.json` and the like are kept: not where nothing was asked for that Trainer lacks."""
        return self._ext_planned.keeps_records

    @property
    def checkpoints(self) -> CheckpointStore:
        """The store that training saves into."""
        return self._ext_parts.saver.store

    @property
    def throughput(self) -> ThroughputCallback:
        """Live rates of the run."""
        return self._ext_parts.throughput

    @property
    def run_clock(self) -> RunClockCallback:
        """How long the run has trained, over all its sessions."""
        return self._ext_parts.run_clock

    @property
    def stopping_decisions(self) -> list[Json]:
        """Those of early stopping."""
        return self._ext_parts.early_stopping.decisions

    @property
    def collapse_alarms(self) -> list[Json]:
        """Every alarm said while training."""
        return self._ext_parts.collapse_alarm.alarms

    @property
    def stop_reason(self) -> str | None:
        """Why training stopped before its end, or None."""
        return self._ext_parts.stopper.reason

    def checkpoint_sizes(self) -> Sizes:
        """Returns upper bounds of what one checkpoint takes."""
        return self._ext_parts.saver.retention.sizes()


class FastSeq2SeqTrainer(FastTrainer, Seq2SeqTrainer):
    """`FastTrainer` for models that generate: evaluates and predicts as `transformers.Seq2SeqTrainer` does."""


class Events(TrainerCallback):
    """What Trainer's events mean for several parts at once, or need of the trainer itself. Comes after their own."""

    def __init__(self, trainer: FastTrainer):
        self._trainer = trainer

    def on_train_begin(self, *event: object, **kwargs: object) -> None:
        """Begins a run, after Trainer has made or restored its state and set its counters to zero."""
        trainer = self._trainer
        trainer._ext_parts.evaluator.choose_rows()  # says what is wrong with them before anything is trained
        begin = self._begin_on_disk if trainer.args.should_save else None
        trainer._ext_parts.team.load_together(
            begin, trainer._ext_parts.saver.describe_failure
        )  # a refusal is one on all processes
        trainer._ext_parts.saver.check_finite()  # weights that are not finite would make all others so
        trainer._ext_parts.resumer.go_on()

    def _begin_on_disk(self) -> None:
        """Finishes a rotation that was cut short; checks the budget once the optimizer exists."""
        retention = self._trainer._ext_parts.saver.retention
        retention.rotate()
        self._trainer.checkpoints.begin_copies(retention.best_step())
        retention.check()

    def on_save(self, *event: object, **kwargs: object) -> None:
        """Finishes a checkpoint that has its name, once all others had to write stands there; does not wait."""
        self._trainer._ext_parts.saver.finish(waits=False)

    def on_step_end(self, *event: object, **kwargs: object) -> None:
        """Finishes the checkpoint under way: after one optimizer step at most it is whole."""
        self._trainer._ext_parts.saver.finish()


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of a constructor by their names, those without one in the order of Trainer's.

    By name, because a class between this one and Trainer may have another order.
    """
    if len(args) > len(PARAMETERS):
        raise TypeError(f"{len(args)} arguments by position: Trainer takes {', '.join(PARAMETERS)}.")
    named = dict(zip(PARAMETERS, args))
    if twice := named.keys() & kwargs.keys():
        raise TypeError(f"Given twice, by position and by name: {', '.join(sorted(twice))}.")
    return {**named, **kwargs}
