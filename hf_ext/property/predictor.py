"""Predictions from a trained model in a few lines of Python: rows of sequences in, numbers or classes out."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from .. import speedups
from ..arguments import PredictingArguments
from ..baselines import TOKENS_PER_BATCH, columns_of, embed_distinct
from ..checkpoints import find_members, open_model
from ..data import (
    NUMBERS,
    RESIDUES,
    SOURCE_ROW,
    RowSchema,
    SequenceCollator,
    as_dataset,
    batches_by_tokens,
    check_inputs,
    format_errors,
)
from ..embeddings import find_inputs, take_rows
from ..errors import DataError
from ..heads import half_width, mix_spreads, require_spread
from ..labels import as_array, average
from ..models import AffinityModel, identify_encoder
from ..reporting import describe_inputs
from ..trainer import FastTrainer
from ..training_args import FastTrainingArguments
from .prediction_file import WHERE, check_predictions

logger = logging.getLogger(__name__)

ROWS_PER_BATCH = 4096  # of pooled embeddings, through the head


class AffinityPredictor:
    """Predicts with a trained `AffinityModel`; what it was trained on it reads by itself from the model's folder.

    Args:
        model: put into evaluation mode and moved to `device`.
        collator: of that model.
        device: None takes the accelerator where there is one, else the CPU.

    Attributes:
        others: of a folder of several models (`--folds`, `--num_seeds`), those beside this one: predictions are means.
    """

    def __init__(self, model: AffinityModel, collator: SequenceCollator, *, device: str | torch.device | None = None):
        self.device = torch.device(device) if device is not None else find_device()
        self.collator = collator
        self.others: Sequence[AffinityPredictor] = ()
        self.model: Any = model.to(self.device).eval()  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, revision: str | None = None, device: str | torch.device | None = None
    ) -> AffinityPredictor:
        """Loads what `recipes/max_speed.py` wrote, from a folder or from the Hub.

        Args:
            name_or_path: folder or Hub id. A folder of that name comes first.
            revision: commit, tag or branch of a Hub model; a commit makes predictions repeatable.
            device: as for `AffinityPredictor`.

        Raises:
            ArgumentError: no such model, one of another kind or damaged, or an encoder that it refers to is not there.

        Cost: one download of the model into the Hub's cache, without network the next time; encoders that it refers to
        are downloaded and loaded likewise. Tokens come from `HF_TOKEN` or `hf auth login`.
        """
        first, *others = find_members(name_or_path, revision)
        predictor = cls._open(first, device)
        predictor.others = [cls._open(one, device, predictor) for one in others]
        return predictor

    @classmethod
    def _open(cls, folder: Path, device: Any, like: AffinityPredictor | None = None) -> AffinityPredictor:
        """Loads one model; frozen encoders that it has in common with `like` are not loaded again."""
        device = torch.device(device) if device is not None else find_device()
        model: Any = load_model(folder)
        # The kernels of `hf-ext predict`: under half precision others round so that predictions differ visibly.
        model.transform_encoders(speedups.fuse_gelu)
        if device.type == "cpu":
            model.transform_encoders(partial(speedups.set_attention, kernel="blocked"))
        pairs = zip(model.config.encoder_specs, like.model.config.encoder_specs if like else ())
        for index, (spec, known) in enumerate(pairs):
            if like and spec.training == "frozen" and identify_encoder(spec) == identify_encoder(known):
                model.encoders[str(index)] = like.model.encoders[str(index)]
        model.attach_encoders()
        return cls(model, SequenceCollator.from_pretrained(folder), device=device)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the model reads: of sequences, then of what stands beside them."""
        return [*columns_of(self.collator), *self.collator.numbers.columns]

    def predict(self, rows: Any) -> Any:
        """Predicts what the model was trained on: a number per row, or what `--task` of that run was.

        Args:
            rows: n rows with `columns`, as a list of dicts, a dict of lists, a `datasets.Dataset` or a pandas
                DataFrame; other columns are ignored. Residues in capital or small letters. A chain that the model has
                learned to do without (`--missing_chains`) may be "", None or NaN.

        Returns:
            In the order of `rows`: regression (n,), float32, label units, of k values (n, k); classification (n,)
            names; multilabel a list of n tuples of names, those whose probability is above one half;
            residue_classification a list of n strings, or arrays where names are no letters, residue_regression of n
            arrays, float32, of the residues that the encoder took. Equal to `hf-ext predict` up to rounding, which
            residue states that a run stored in float16 make larger, and other kernels of a run that trained encoders in
            half precision.

        Raises:
            DataError: a column is missing; a sequence is missing, empty, holds what is no residue, or is too long for
                its encoder and `predictor.collator.too_long` is "error"; a prediction is not finite; all refused
                rows are named, counted from 1.

        What is too long is read in windows, or cut, with a warning, as in training (`--too_long`).

        Cost: each distinct input runs through its encoder once, in batches of 8,192 residues, sorted by length.
        `recipes/predict.py` is faster for many rows: it uses the speed-ups of training and keeps embeddings.
        """
        return self.model.config.kind.decode(self._predict_mean(rows))

    def predict_proba(self, rows: Any) -> Any:
        """Predicts probabilities of the classes, float32, in the order of `predictor.model.config.kind.names`.

        Args:
            rows: as for `predict`.

        Returns:
            (n, classes): of a classification, each row adds up to 1; of a multilabel task each label by itself. Of
            residues a list of n arrays, (residues, classes).

        Raises:
            ArgumentError: the model predicts numbers.
            DataError: as `predict`.
        """
        self.model.config.kind.check_probabilities()
        return self._predict_mean(rows)

    def _predict_mean(self, rows: Any) -> Any:
        kind = self.model.config.kind
        return average([kind.to_predictions(outputs) for outputs, _ in self._all_outputs(rows)])

    def predict_std(self, rows: Any) -> Any:
        """Predicts standard deviations of measured values around `predict`'s, (n,); ArgumentError if it has none."""
        for one in (self, *self.others):
            require_spread(one.model.config.prediction_spread, "predict_std")
        means, stds = zip(*self._all_outputs(rows))
        return mix_spreads(means, stds)

    def logits(self, rows: Any) -> Any:
        """Returns what this one model puts out, float32: (n, ...), or of residues a list of n arrays."""
        return self._outputs(rows, {})[0]

    def _all_outputs(self, rows: Any) -> list[tuple[Any, Any]]:
        """Returns `_outputs` of each model; encoders that several have in common run once."""
        shared: dict[Any, torch.Tensor] = {}
        return [one._outputs(rows, shared) for one in (self, *self.others)]

    @torch.no_grad()
    def _outputs(self, rows: Any, shared: MutableMapping[Any, torch.Tensor]) -> tuple[Any, Any]:
        """Returns what `logits` and `predict_std` do; None for what the model lacks.

        `shared`: embeddings of these rows by encoders that several models have in common; filled.
        """
        table = _read_rows(rows, self.collator)
        for line in describe_inputs(check_inputs(self.collator, {"rows": table})) if len(table) else ():
            logger.warning(line)
        if self.model.config.kind.per_residue:
            return self._residue_logits(table), None
        self.model.attach_encoders()
        numbers = {}
        tables = {}
        optional = self.collator.optional_inputs
        for name in self.collator.columns:
            positions, inputs = find_inputs(table, self.collator, name)
            numbers[name] = torch.from_numpy(positions)
            key = name, id(self.model.encoders[str(self.model.tower_of(name).encoder)])
            if key not in shared:
                shared[key] = embed_distinct(self.model, self.collator, name, inputs, device=self.device)
            tables[name] = shared[key]
        beside = {NUMBERS: self.collator.numbers.matrix(table)}
        if self.collator.residues:
            beside[RESIDUES] = self.collator.read_residues(table)
        found = []
        stds = []
        for start in range(0, max(1, len(table)), ROWS_PER_BATCH):
            chosen = {name: each[start : start + ROWS_PER_BATCH] for name, each in numbers.items()}
            pooled = {name: take_rows(tables[name], each).to(self.device) for name, each in chosen.items()}
            missing = {name: (chosen[name] < 0).to(self.device) for name in optional}
            part = slice(start, start + ROWS_PER_BATCH)
            read = {name: torch.from_numpy(one[part]).to(self.device) for name, one in beside.items()}
            outputs = self.model(embeddings=pooled, missing=missing, **read)
            found.append(outputs.logits.float().cpu())
            stds.append(outputs.std)
        std = None if stds[0] is None else torch.cat(stds).cpu().numpy()
        return check_predictions(torch.cat(found).numpy()), std

    def _residue_logits(self, table: datasets.Dataset) -> list[np.ndarray]:
        (name,) = self.collator.columns
        numbers, distinct = find_inputs(table, self.collator, name)
        found = [None] * len(distinct)
        for chosen in batches_by_tokens([*map(len, distinct)], TOKENS_PER_BATCH):
            batch = self.collator.encode(name, [distinct[i] for i in chosen])
            batch = {key: value.to(self.device) for key, value in batch.items()}
            logits = self.model(sequences={name: batch}).logits.float().cpu().numpy()
            lengths = batch["residue_mask"].sum(1).tolist()
            for i, row in zip(chosen, self.model.config.kind.split_rows(logits, lengths)):
                found[i] = row
        return check_predictions([found[i] for i in numbers])

    def predict_interval(self, rows: Any, level: float = 0.9) -> np.ndarray:
        """Predicts between which two numbers the measured value of each row lies; `predict` is their middle.

        The width is how far predictions were off on the validation rows of the training run, the same for all rows, or
        in proportion to `predict_std` where that gave better ones; of several models the mean of theirs. It speaks
        about rows as new to the model as those. `level`, between 0 and 1, is the share of rows whose value the interval
        is to hold.

        Returns:
            (n, 2), float32, label units: low and high.

        Raises:
            ArgumentError: not a level; the model has no intervals, or none of this level.
            DataError: as `predict`.
        """
        every = [self, *self.others]
        stored = [one.model.config.prediction_intervals for one in every]
        for one in stored:
            half_width(one, level)  # else refused before rows are read
        found = self._all_outputs(rows)
        reach = sum(half_width(one, level, stds) for one, (_, stds) in zip(stored, found)) / len(every)
        predicted = average([outputs for outputs, _ in found])
        return np.stack([predicted - reach, predicted + reach], axis=1).astype(np.float32)


def load_model(folder: str | Path) -> AffinityModel:
    """Loads the model in `folder`, verified, from safetensors alone; encoders that it refers to, when first needed.

    Raises:
        ArgumentError: files are missing, damaged or not those of its manifest, or hold what is not finite.

    Cost: as `open_model`.
    """
    return open_model(AffinityModel, folder)


def training_arguments(
    computing: PredictingArguments, explicit: Collection[str] = (), **more: Any
) -> FastTrainingArguments:
    """Makes the arguments of a trainer that only predicts; `explicit` are the names of those that the user set."""
    given = {**vars(computing)}
    if computing.speedups is None:
        given["speedups"] = [speedup.NAME for speedup in speedups.REGISTRY if speedup.predicts]
    args = FastTrainingArguments(**given, **more, report_to="none")
    args.mark_explicit(frozenset(explicit) & vars(computing).keys())
    return args


@contextmanager
def predicting(model: AffinityModel, collator: SequenceCollator, args: FastTrainingArguments) -> Iterator[FastTrainer]:
    """Yields a trainer that predicts tables with what `args` ask for: speed-ups, precision, cache, processes.

    It writes to no output folder, and what it switched in this process is switched back at the end.
    """
    with tempfile.TemporaryDirectory() as scratch:
        own = copy.copy(args)
        own.output_dir = scratch
        trainer = FastTrainer(model, own, data_collator=collator)
        try:
            yield trainer
        finally:
            trainer.close()


def _read_rows(rows: Any, collator: SequenceCollator) -> datasets.Dataset:
    """Reads the columns of `rows`, as in `AffinityPredictor.predict`, as the data layer accepts them.

    Raises:
        DataError: no table, a missing column, columns of unequal length; cells that are refused, with row and reason.
    """
    args = collator.make_arguments()
    columns = [*args.sequence_columns, *args.number_columns]
    try:
        frame = rows.to_pandas() if isinstance(rows, datasets.Dataset) else pd.DataFrame(rows)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"rows cannot be read as a table ({error}): give a list of dicts, a dict of lists, a datasets.Dataset or a "
            f"pandas DataFrame with {', '.join(columns)}."
        ) from error
    if len(frame) == 0:
        return datasets.Dataset.from_dict({name: [] for name in columns})
    if missing := [name for name in columns if name not in frame]:
        present = [*map(str, frame.columns[:30])]
        raise DataError(f"rows have no column {missing[0]!r}: the model reads {columns}, there are {present}.")
    cells = {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in columns}
    numbered = {name: as_array(one) for name, one in cells.items()} | {SOURCE_ROW: np.arange(1, 1 + len(frame))}
    cleaned = RowSchema(args, needs_labels=False, needs_splits=False).clean(pa.table(numbered), WHERE)
    if cleaned.errors:
        refused = format_errors([(WHERE, error) for error in cleaned.errors])
        raise DataError(
            f"{refused}\nFix or remove these rows. Options that begin with -- are those of `hf-ext predict`."
        )
    return as_dataset(cleaned.table)


def find_device() -> torch.device:
    """Finds the accelerator where there is one, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None else torch.device("cpu")
