"""Finding out about a generator's run: its rows, its plan, and what each of the three stages would take."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset

from ..arguments.checks import check_metric_name
from ..data.arguments import DataArguments
from ..data.reading import is_on_hub
from ..errors import DataError
from ..generation.arguments import GeneratorArguments
from ..generation.building import build_config
from ..generation.preparing import load_pairs, settle_columns
from ..generation.stages import STAGES, check_auto, settle_stage
from ..hardware import Hardware, describe_hardware, known_hardware
from ..masked_lm.results import EVALUATION_METRICS
from ..models.configuration import EncoderSpec
from ..models.generation.model import AntibodyGenerator
from ..plan import Plan, make_plan
from ..speedups.trainer_fields import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH
from . import estimates
from .arguments import DoctorArguments
from .attempts import Attempts
from .facts import Facts
from .gathering import size_up
from .machine import Machine, read_machine
from .measuring import measure_rate
from .packages import read_packages
from .pair_lengths import PairLengths
from .stage_estimates import (
    StageEstimate,
    StageTime,
    StageWork,
    estimate_card,
    estimate_stage,
    read_once,
    sum_work,
    training_dtype,
)
from .stage_trial import measure_training
from .work import Encoder, Tokens, Work, sketch_encoder

Rows = dict[str, PairLengths]
# Without data: as many rows as a large set with measured affinities has; antigens as in the 18,507 pairs that MAGE was
# trained on (github.com/IGlab-VUMC/MAGE_ab_generation): 1,336 of them, of 470 residues on average.
ASSUMED_ROWS = {"train": 127_000, "validation": 16_000}
ASSUMED_RESIDUES, ROWS_PER_ANTIGEN = (470, 230), 14  # of antigen and of pair
STATE_BYTES = 4  # of a number of a frozen encoder's states, on disk
REMEDIES = {
    "arguments": "what the message says; hf-ext generate --help all lists all arguments",
    "data": "--dataset_name, --antigen_column, --heavy_column, --light_column, --label_column as the file has them",
    "model": "--architecture, --size; --antigen_encoder: a Hub id or a folder, without a network HF_HUB_OFFLINE=1",
}


@dataclass(frozen=True)
class _Stage:
    """A stage as it would run: its arguments, plan and work, and how long that takes."""

    args: Any
    plan: Plan
    work: Work
    schedule: estimates.Schedule
    estimate: StageEstimate


def gather_generator(
    model_args: GeneratorArguments, data_args: DataArguments, args: Any, doctor: DoctorArguments
) -> Facts:
    """Everything that can be known of a run of `recipes/generate_antibody.py` before it starts.

    All three stages are sized up, whichever `--stage` names; plan, memory and disk are those of the last that it names.

    Args:
        model_args, data_args, args: as the recipe parses them. `data_args` is settled, as the recipe does.
        doctor: see `DoctorArguments`.

    Raises:
        ArgumentError: an unknown `doctor.device`. All else that is wrong is a `Finding`.

    Cost: reading the data as the run would, once; about twice `doctor.measure_seconds` for each stage, or a training
    step of 8 tokens a sequence where that takes longer.
    """
    machine, packages = read_machine(args, doctor.device), read_packages()
    reader = _Reader(model_args, data_args, args, machine, doctor.measure_seconds)
    rows, stages = reader.read_rows() or {}, {}
    for number in STAGES if rows else ():
        stage: _Stage | None = reader.attempt("model", partial(reader.look, number, rows))
        if stage is not None:
            stages[number] = stage
    last = stages.get(model_args.stages[-1])
    found: dict[str, Any] = {"why_no_time": "rows or model could not be read"}
    if last is not None:
        found = _size_up(last, model_args.save_full, reader.is_assumed)
        found |= _add_up([stages[number].estimate for number in model_args.stages if number in stages])
        args = last.args
    found |= {"data": reader.report, "problems": reader.problems, "notes": reader.notes}
    found["stages"] = [stage.estimate for stage in stages.values()]
    return Facts("generation", args, machine, packages, **found)


class _Reader(Attempts):
    """Reads rows as the recipe would, and sizes up its stages; what fails becomes a finding."""

    def __init__(
        self, model_args: GeneratorArguments, data_args: DataArguments, args: Any, machine: Machine, seconds: float
    ):
        super().__init__(REMEDIES)
        self.model_args, self.data_args, self.args = model_args, data_args, args
        self.machine, self.seconds = machine, seconds
        self.report: dict[str, Any] = {}
        self.is_assumed = False

    def read_rows(self) -> Rows | None:
        """Of training and validation, before any filter or limit, and of the test split; None: they cannot be read."""
        self.attempt("arguments", lambda: check_metric_name(self.args.metric_for_best_model, EVALUATION_METRICS))
        self.attempt("arguments", self._check_auto)
        if not self.attempt("arguments", self._settle_columns):
            return None
        name = self.data_args.dataset_name
        if name is None:
            self.notes.append(
                "No --dataset_name: the recipe then trains a small model on generated pairs, in about a minute."
            )
            return self._assume()
        if is_on_hub(name):
            self.notes.append(f"{name} is a Hub dataset: it is not downloaded here, so rows are not known.")
            return self._assume()
        return self.attempt("data", self._load)

    def _check_auto(self) -> None:
        if self.model_args.stage == "auto":
            check_auto(self.args)

    def _settle_columns(self) -> bool:
        settle_columns(self.model_args, self.data_args, self.args.explicit_fields)
        return True

    def _assume(self) -> Rows:
        self.is_assumed = True
        antigen, pair = ASSUMED_RESIDUES
        listed = ", ".join(f"{num:,} {name}" for name, num in ASSUMED_ROWS.items())
        self.notes.append(
            f"Stages are sized up for {listed} rows, assumed: antigens of {antigen} residues, {ROWS_PER_ANTIGEN} rows "
            f"of each, and antibodies of {pair}."
        )
        return {name: PairLengths.assumed(num, antigen, pair, ROWS_PER_ANTIGEN) for name, num in ASSUMED_ROWS.items()}

    def _load(self) -> Rows:
        """All rows, so that the limits and the filter of each stage can be taken from them."""
        model_args, data_args = copy.copy(self.model_args), copy.copy(self.data_args)
        model_args.min_affinity = model_args.max_validation_samples = data_args.max_train_samples = None
        with tempfile.TemporaryDirectory() as scratch:
            data = load_pairs(model_args, data_args, self.args.explicit_fields, output_dir=scratch, seed=self.args.seed)
        self.report = data.report
        found = {}
        for name in data.splits:
            rows = data.antibodies(name)
            found[name] = PairLengths.of_sequences(rows.antigens, rows.heavy, rows.light, data.affinities(name))
        return found

    def look(self, number: int, rows: Rows) -> _Stage | None:
        """A stage with the rows that it would take; None: its filter leaves none, which is a finding.

        Raises:
            ArgumentError: a configuration that cannot be.
        """
        model_args, data_args, args = copy.copy(self.model_args), copy.copy(self.data_args), copy.copy(self.args)
        settle_stage(number, model_args, data_args, args, self.args.explicit_fields)
        taken = self.attempt("data", lambda: _take(rows, model_args, data_args, args.seed))
        if taken is None:
            return None
        with torch.device("meta"):
            model = AntibodyGenerator(build_config(model_args, args))
        encoder = _sketch_encoder(model, [*rows.values()], taken["train"])
        work = _size(model, encoder, taken)
        plan = _plan(args, work, taken["train"], self.machine.hardware)
        schedule = estimates.make_schedule(args, plan, work)
        assert schedule is not None  # rows have a number, as no stream has
        frozen = encoder if encoder is not None and encoder.training == "frozen" else None
        summed = sum_work(number, str(model_args.size), model, taken, schedule, args, frozen)
        cards = self._look_at_cards(summed, args, work, taken["train"])
        return _Stage(args, plan, work, schedule, StageEstimate(summed, self._time_here(summed, plan, taken), cards))

    def _look_at_cards(self, summed: StageWork, args: Any, work: Work, train: PairLengths) -> dict[str, StageTime]:
        """Times on the cards of the hardware table; cards with the same precisions have one plan."""
        plans: dict[tuple[bool, ...], Plan] = {}
        cards = [card for card in map(describe_hardware, known_hardware()) if card.kind == "cuda"]
        for card in cards:
            able = card.native_bf16, card.native_fp16, card.tf32
            if able not in plans:
                plans[able] = _plan(args, work, train, card)
        return {
            card.name: estimate_card(summed, card, plans[card.native_bf16, card.native_fp16, card.tf32])
            for card in cards
        }

    def _time_here(self, work: StageWork, plan: Plan, rows: Rows) -> StageTime:
        hardware = self.machine.hardware
        if self.machine.is_described or not self.seconds:
            return estimate_card(work, hardware, plan)
        dtype = training_dtype(plan)
        speed, limit = measure_training(work.config, hardware, dtype, rows["train"], work.batch_rows, self.seconds)
        what = f"{work.batch_rows} rows of stage {work.number}, cut at {limit} tokens, forward and backward"
        rate = estimates.measured_rate(speed, dtype, what)
        encoder_rate = None
        if work.encoder is not None:
            tokens = CPU_TOKENS_PER_BATCH if hardware.kind == "cpu" else GPU_TOKENS_PER_BATCH
            length = max(8, round(work.encoder.distinct.squares / max(1, work.encoder.distinct.total)))
            given: dict[str, Any] = {"length": length, "tokens": tokens, "seconds": self.seconds}
            encoder_rate = estimates.measured_rate(measure_rate(work.encoder.config, hardware, "fp32", **given), "fp32")
        span = estimate_stage(work, rate, encoder_rate, is_gpu=False)  # the time steps of an LSTM are in the rate
        return StageTime(hardware.name, dtype, span, rate.basis)


def _take(rows: Rows, model_args: GeneratorArguments, data_args: DataArguments, seed: int) -> Rows:
    train = rows["train"].above(model_args.min_affinity)
    if len(train) < min(2, len(rows["train"])):
        raise DataError(
            f"--min_affinity {model_args.min_affinity:g} leaves {len(train)} of {len(rows['train']):,} training rows: "
            "give a smaller one, or check --label_column."
        )
    return {
        "train": train.limited(data_args.max_train_samples, seed),
        "validation": rows["validation"].limited(model_args.max_validation_samples, seed),
    }


def _sketch_encoder(model: AntibodyGenerator, rows: list[PairLengths], train: PairLengths) -> Encoder | None:
    """A pretrained encoder of antigens, all that it may read once, and what training reads; None: there is none."""
    if model.config.antigen_encoder is None:
        return None
    with torch.device("meta"):
        encoder = sketch_encoder(EncoderSpec(**model.config.antigen_encoder))
    return replace(read_once(encoder, rows), train=Tokens.of_lengths(train.antigen_tokens[train.antigen_index]))


def _size(model: AntibodyGenerator, encoder: Encoder | None, rows: Rows) -> Work:
    train, encoders = rows["train"], [] if encoder is None else [encoder]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    other = int(train.pair_tokens.sum()) + (0 if encoders else int(train.antigen_tokens[train.antigen_index].sum()))
    head = trainable - sum(each.num_trainable for each in encoders)
    num_rows = {name: len(found) for name, found in rows.items()}
    return Work(model, {}, encoders, head, num_rows=num_rows, other_tokens=other)


def _plan(args: Any, work: Work, train: PairLengths, hardware: Hardware) -> Plan:
    lengths = Dataset.from_dict(
        {args.length_column_name: train.pair_tokens + train.antigen_tokens[train.antigen_index]}
    )
    return make_plan(args, work.model, lengths, None, hardware)


def _size_up(stage: _Stage, save_full: bool, is_assumed: bool) -> dict[str, Any]:
    found = size_up(stage.args, stage.plan, stage.work, save_full)
    frozen = [encoder for encoder in stage.work.encoders if encoder.training == "frozen"]
    if not is_assumed:
        found["embedding_bytes"] = sum(each.distinct.total * each.width * STATE_BYTES for each in frozen)
    return {**found, "plan": stage.plan, "work": stage.work, "schedule": stage.schedule}


def _add_up(stages: list[StageEstimate]) -> dict[str, Any]:
    """Times of the stages that the command does."""
    unknown = next((stage.here for stage in stages if stage.here.seconds is None), None)
    if unknown is not None:
        return {"why_no_time": unknown.basis}
    basis = "; ".join(dict.fromkeys(stage.here.basis for stage in stages))
    lines = [(f"stage {stage.work.number}, at most {stage.work.steps:,} steps", stage.here.seconds) for stage in stages]
    return {"rate_basis": basis, "seconds": lines}
