"""Finding out: machine, packages, data, model, plan, estimates. Nothing is trained, downloaded or written."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..affinity import building as affinity
from ..affinity.measure import check_measure, describe_measure
from ..affinity.rows import audit_labels, load_rows
from ..affinity.scoring import read_requirements
from ..arguments.checks import check_metric_name
from ..data.arguments import DataArguments
from ..data.demo import make_demo_encoders
from ..data.loading import load_data
from ..data.reading import is_on_hub
from ..embeddings.store import check_stores
from ..evaluation.requirements import parse_requirements
from ..evaluation.row_metrics import RowMetrics
from ..masked_lm import building as masked_lm
from ..masked_lm.results import EVALUATION_METRICS as MASKED_LM_METRICS
from ..masked_lm.results import SCORES
from ..memory.report import MemoryReport
from ..plan import Plan, make_plan
from ..running import check_inputs
from ..speedups.lora import lora_settings
from ..speedups.trainer_fields import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH
from . import estimates, sizes
from .arguments import DoctorArguments
from .attempts import Attempts
from .facts import Facts, Finding
from .machine import Machine, read_machine
from .measuring import measure_rate
from .memory import predict_memory
from .packages import read_packages
from .work import Encoder, Work, add_data, sketch_affinity, sketch_masked_lm

# The messages themselves say what is allowed; these name the flags.
REMEDIES = {
    "model": "a Hub id or a folder; without a network: HF_HUB_OFFLINE=1 after `hf download` of each encoder",
    "data": "--dataset_name, --sequence_columns, --label_column, --split_column as the file has them; --bad_rows drop",
    "measure": "one of the metrics named, for example --metric_for_best_model rmse; left out, the loss decides",
    "inputs": "--too_long truncate or window, --max_residues N; another encoder where residues are unknown to it",
}


def gather(task: str, model_args: Any, data_args: DataArguments, args: Any, doctor: DoctorArguments) -> Facts:
    """Everything that can be known of a run before it starts.

    Args:
        task: "affinity" or "masked_lm".
        model_args: `AffinityArguments` or `MaskedLMArguments`; with `data_args` and `args` as the recipe parses them,
            and for affinity after `settle_measure`.
            Without `dataset_name` the demo's data and encoders are filled in.
        doctor: see `DoctorArguments`.

    Raises:
        ArgumentError: an unknown `doctor.device`. All else that is wrong is a `Finding`.

    Cost: reading the data as the run would, near copies between splits included, `doctor.measure_seconds`, of Hub
    encoders their config.json, and of an embedding cache all it holds, about 1 s per GB.
    """
    machine, packages = read_machine(args, doctor.device), read_packages()
    with tempfile.TemporaryDirectory() as scratch:
        reader = _Reader(task, model_args, data_args, args, Path(scratch))
        work, splits = reader.read()
        if task == "masked_lm" and model_args.stock_trainer:
            reader.notes.append("--stock_trainer: transformers.Trainer itself, without any of these speed-ups.")
            args = copy.copy(args)
            args.speedups = []
        for name in ("init_head_from", "distill_from"):
            if getattr(model_args, name, None):
                reader.notes.append(f"--{name}: that model is read by the run alone; its time is not in the estimate.")
        plan = _plan(args, work, splits, machine)
        if plan.applied("embedding_cache") and (held := check_stores(machine.cache_dir)):
            reader.notes.append(held)
        found: dict[str, Any] = {"why_no_time": "the model could not be read"}
        if work:
            found = size_up(args, plan, work, getattr(model_args, "save_full", False))
            found |= _estimate_time(plan, work, found["schedule"], machine, doctor.measure_seconds)
    found |= {
        "measure": reader.measure,
        "data": reader.report,
        "labels": reader.labels,
        "problems": reader.problems,
        "notes": reader.notes,
    }
    facts = Facts(task, args, machine, packages, plan, work, **found)
    return replace(facts, forecast=forecast_memory(facts)) if work else facts


def forecast_memory(facts: Facts) -> MemoryReport | str:
    """The ledger's, of facts with plan, work and schedule; or why there is none."""
    plan, work, args = facts.plan, facts.work, facts.args
    assert plan
    assert work
    rows = args.per_device_train_batch_size
    if facts.schedule:
        rows = max(1, round(facts.schedule.batch_rows / args.world_size))
    return predict_memory(args, plan, work, rows, facts.device_bytes, plan.applied("embedding_cache"))


def _plan(args: Any, work: Work | None, splits: dict[str, Any], machine: Machine) -> Plan:
    model, inputs = (work.model, SimpleNamespace(columns=work.columns)) if work else (None, None)
    return make_plan(args, model, splits.get("train"), inputs, machine.hardware)


class _Reader(Attempts):
    """Reads data and model as the recipe would; what fails becomes a finding, and the rest goes on without it."""

    def __init__(self, task: str, model_args: Any, data_args: DataArguments, args: Any, scratch: Path):
        super().__init__(REMEDIES)
        self.task, self.model_args, self.data_args, self.args = task, model_args, data_args, args
        self.scratch = scratch
        self.report: dict[str, Any] = {}
        self.labels: dict[str, Any] = {}
        self.measure = ""

    def read(self) -> tuple[Work | None, dict[str, Any]]:
        """The work, with data where there is any, and the splits."""
        table = self._fill_in_demo() if self.data_args.dataset_name is None else None
        work = self.attempt("model", self._sketch)
        splits: Mapping[str, Any] = self.attempt("data", lambda: self._load(table)) or {}
        self.attempt("measure", lambda: self._read_measure(splits.get("validation")))
        if work and splits:
            limits = self.attempt("inputs", lambda: self._check_inputs(work, splits)) or {}
            work = add_data(work, splits, limits)
            if work.is_stream and self.args.max_steps <= 0:
                text = "a stream has no length, so when training ends is not known"
                self.problems.append(Finding("stream", "stops", text, "--max_steps N"))
        return work, dict(splits)

    def _fill_in_demo(self) -> Any:
        self.notes.append("No --dataset_name: generated demo data and small untrained encoders.")
        if self.task == "masked_lm":
            masked_lm.fill_in_demo(self.model_args)
            return masked_lm.make_demo_sequences()
        encoders = make_demo_encoders(self.scratch / "demo_encoders")
        return affinity.fill_in_demo(self.model_args, self.data_args, encoders)

    def _read_measure(self, validation: Any) -> None:
        if self.task != "affinity":
            check_metric_name(self.args.metric_for_best_model, MASKED_LM_METRICS)
            parse_requirements(self.model_args.require, SCORES)
            return
        metrics = RowMetrics(self.model_args.binder_threshold, self.data_args.group_column)
        check_measure(self.args, self.model_args.loss, metrics, validation)
        read_requirements(self.model_args, self.data_args)
        self.measure = describe_measure(self.args, self.model_args.loss, metrics)

    def _sketch(self) -> Work:
        columns = self.data_args.sequence_columns
        if self.task == "masked_lm":
            return sketch_masked_lm(self.model_args, columns)
        given = self.model_args
        given.tower_training, self.args.use_peft = affinity.settle_training(given, self.args.use_peft)
        return sketch_affinity(given, columns, lora_settings(self.args))

    def _load(self, table: Any) -> Any:
        name = self.data_args.dataset_name
        if name and is_on_hub(name):
            self.notes.append(f"{name} is a Hub dataset: it is not downloaded here, so rows are not known.")
            return None
        source = {"output_dir": self.scratch, "seed": self.args.seed, "table": table}
        if self.task == "affinity":
            loaded = load_rows(self.model_args, self.data_args, **source)
            if not self.data_args.streaming:
                self.labels = audit_labels(loaded.splits["train"])
        else:
            loaded = load_data(self.data_args, needs_labels=False, **source)
        self.report = loaded.report
        return loaded.splits

    def _check_inputs(self, work: Work, splits: Any) -> dict[str, int | None]:
        """Checks vocabulary and length limits where the tokenizers are at hand; the limits in residues."""
        names = self.model_args.encoders if self.task == "affinity" else [self.model_args.model_name_or_path]
        absent = [name for name in names if name is not None and not Path(name).is_dir()]
        if absent:
            self.notes.append(f"{', '.join(absent)}: tokenizer not at hand, so input lengths are checked by the run.")
            # Of tokens one or two are special: that much too long is near enough for what a run would take.
            given = (self.data_args.max_residues, getattr(self.model_args, "max_length", None))
            limit = min(filter(None, given), default=None) if self.data_args.too_long != "error" else None
            return dict.fromkeys(work.columns, limit)
        if self.task == "affinity":
            collator: Any = affinity.build_collator(work.model, self.data_args, self.model_args.max_length)
            limits = {name: tokenizer.max_residues for name, tokenizer in collator.tokenizers.items()}
        else:
            tokenizer = masked_lm.build_tokenizer(self.model_args)
            collator = masked_lm.build_collator(tokenizer, work.model, self.model_args, self.data_args, self.args.seed)
            limits = dict.fromkeys(work.columns, collator.max_residues)
        self.report["inputs"] = check_inputs(collator, splits, self.data_args.dataset_name)
        return limits


def size_up(args: Any, plan: Plan, work: Work, save_full: bool) -> dict[str, Any]:
    """Schedule, memory, disk and downloads of a run, as `Facts` names them."""
    schedule = estimates.make_schedule(args, plan, work)
    rows = schedule.batch_rows if schedule else args.per_device_train_batch_size * args.world_size
    memory, static_bytes, step_bytes = sizes.estimate_memory(args, plan, work, rows)
    cached = [encoder for encoder in work.encoders if encoder.training == "frozen" and plan.applied("embedding_cache")]
    return {
        "schedule": schedule,
        "save_full": save_full,
        "memory": memory,
        "static_bytes": static_bytes,
        "step_bytes": step_bytes,
        # In float32 first: what half precision would round is measured against it.
        "encoding_bytes": sum(encoder.num_parameters for encoder in cached) * sizes.WEIGHT_BYTES,
        "checkpoint": sizes.checkpoint_sizes(args, work),
        "output_bytes": sizes.output_bytes(args, work, schedule, save_full),
        "embedding_bytes": sum(e.num_distinct * e.width for e in cached) * sizes.EMBEDDING_BYTES,
        "download_bytes": sum(e.num_parameters for e in work.encoders if not _is_at_hand(e.source))
        * sizes.WEIGHT_BYTES,
    }


def _is_at_hand(source: str | None) -> bool:
    """Whether weights need no download: a new model, a folder, or in the Hub's cache."""
    if source is None or Path(source).is_dir():
        return True
    return any(
        isinstance(try_to_load_from_cache(source, name), str) for name in ("model.safetensors", "pytorch_model.bin")
    )


def _estimate_time(
    plan: Plan, work: Work, schedule: estimates.Schedule | None, machine: Machine, measure_seconds: float
) -> dict[str, Any]:
    if schedule is None or not work.num_rows:
        return {"why_no_time": "without data and a number of epochs or steps, what would pass is not known"}
    rates = []
    for encoder in work.encoders:
        dtype = estimates.encoder_dtype(plan, encoder)
        if machine.is_described or not measure_seconds:
            rate = estimates.published_rate(machine.hardware, dtype, encoder.width)
        else:
            rate = _measure(encoder, dtype, machine, measure_seconds / len(work.encoders))
        if rate is None:
            measure = "" if machine.is_described else "; --measure_seconds 2 measures it"
            return {"why_no_time": f"no {dtype} peak of {machine.hardware.name} is published{measure}"}
        rates.append(rate)
    basis = "; ".join(dict.fromkeys(rate.basis for rate in rates))
    return {"rate_basis": basis, "rates": rates, "seconds": estimates.estimate_seconds(plan, work, schedule, rates)}


def _measure(encoder: Encoder, dtype: str, machine: Machine, seconds: float) -> estimates.Rate:
    length = max(8, round(encoder.train.squares / max(1, encoder.train.total)))
    tokens = CPU_TOKENS_PER_BATCH if machine.hardware.kind == "cpu" else GPU_TOKENS_PER_BATCH
    measured = measure_rate(encoder.config, machine.hardware, dtype, length=length, tokens=tokens, seconds=seconds)
    return estimates.measured_rate(measured, dtype)
