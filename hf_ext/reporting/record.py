"""The record of a run as types: what `all_results.json` and the JSON files beside it hold.

They are written by `to_json` and read by `from_json`, and nowhere else. A run of an older or a newer hf_ext, or of a
task of a script, has other keys: those that a class does not know are in its `own`, where it has that, and passed over
elsewhere. What is missing has its default. Metrics, settings and a task's own facts differ from run to run, so these
are mappings; everything else is an attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from ..errors import DataError
from ..files import Facts
from ..labels import LabelKind, kind_from_state
from ..text import units

logger = logging.getLogger(__name__)

FORMAT = 1  # of all_results.json
Counts = Mapping[str, int]
Number = float | None
Text = str | None
Texts = Sequence[str]


@dataclass_transform(frozen_default=True)
class Frozen:
    """Makes a frozen dataclass of each class under it; `{}` is a default there, a new one for each object."""

    def __init_subclass__(cls) -> None:
        for name in [name for name, default in vars(cls).items() if default == {}]:
            setattr(cls, name, field(default_factory=dict))
        dataclass(frozen=True)(cls)


class Recorded(Frozen):
    """An object of the record, false where nothing of it was recorded."""

    def __bool__(self) -> bool:
        return self != type(self)()

    @classmethod
    def read_other(cls, value: object) -> object:
        """Returns JSON of another form in that of the class."""
        return value


Read = TypeVar("Read", bound=Recorded)


# --- scores -----------------------------------------------------------------------------------------------------------


class Score(Recorded):
    """A score with its interval, see `hf_ext.evaluation.make_score`; or a number alone, which `is_bare`."""

    value: Number = None
    low: Number = None
    high: Number = None
    n: Number = None
    undefined: Text = None
    confidence: Number = None
    interval_by: Text = None
    num_units: Number = None
    is_trusted: bool = True
    threshold: Number = None
    base_rate: Number = None
    groups: Mapping[str, Score] = {}
    is_bare: bool = False

    @property
    def shown(self) -> str:
        """As a reader sees it."""
        return units.score(self.value if self.is_bare else vars(self))

    @classmethod
    def read_other(cls, value: object) -> object:
        """Makes an object of a number."""
        return value if isinstance(value, Mapping) else {"value": value, "is_bare": True}


Scores = Mapping[str, Mapping[str, Score]]  # predictor -> metric -> score


class SplitRecord(Recorded):
    """A split that was scored, or with a `name` some of its rows.

    Attributes:
        baselines: each -> what it was fitted on.
        collapse: of the model's predictions, see `hf_ext.evaluation.collapse_report`.
        own: what the task adds.
    """

    name: str = ""
    num_rows: Number = None
    scores: Scores = {}
    baselines: Mapping[str, Facts] = {}
    slices: Sequence[SplitRecord] = ()
    notes: Texts = ()
    collapse: Facts = {}
    interval_by: Text = None
    own: Facts = {}

    @property
    def of_model(self) -> Mapping[str, Score]:
        """Scores of the model."""
        return self.scores.get("model", {})

    @classmethod
    def read_other(cls, value: object) -> object:
        """Takes scores alone too: predictor -> metric -> number, of masked language models and in old records."""
        if not isinstance(value, Mapping) or "model" not in value:
            return value
        return {"scores": value, "baselines": {name: {} for name in value if name != "model"}}


class VerdictRecord(Recorded):
    """See `hf_ext.evaluation.Verdict`."""

    text: str = ""
    is_better: bool | None = None
    outcome: str = ""
    baseline: Text = None
    comparison: Facts = {}
    own: Facts = {}


# --- data -------------------------------------------------------------------------------------------------------------


class Near(Recorded):
    """How many checked rows have a near copy in training."""

    identity: float = 0
    num_rows: int = 0


class Leak(Recorded):
    """What of the test split stands in training, see `hf_ext.data.split_report.leak_report`."""

    num_test_rows: int = 0
    num_test_sequences: int = 0
    num_test_rows_in_train: int = 0
    num_test_sequences_in_train: int = 0
    num_checked: int = 0
    near: Sequence[Near] = ()


class Leaks(Recorded):
    """The same of whole rows and of each column; `repeated`: numbers of a compared row and of its copy in training."""

    compared: str = "test"
    columns: Mapping[str, Leak] = {}
    row: Leak = Leak()
    repeated: Sequence[Sequence[int]] = ()


class Split(Recorded):
    """How rows were split."""

    rule: str = ""
    seed: Number = None
    identity: Number = None
    notes: Texts = ()


class Inputs(Recorded):
    """What an encoder reads, see `hf_ext.data.batches.input_checks.check_inputs`."""

    longest: int = 0
    cut: str = ""
    windows: str = ""
    unknown_share: float = 0


class DataRecord(Recorded):
    """What loading the data reported; `source` is None where it was generated.

    Attributes:
        changes: column -> kind -> rows.
        missing_chains: column -> split -> rows that lack it.
        train_subset: `num_rows` that were drawn, `of` how many.
    """

    source: Text = ""
    streaming: bool = False
    rows_read: Number = None
    rows_rejected: Number = None
    rejected_by_rule: Counts = {}
    changes: Mapping[str, Counts] = {}
    missing_chains: Mapping[str, Counts] = {}
    split: Split = Split()
    sizes: Counts = {}
    leaks: Leaks = Leaks()
    train_subset: Facts = {}
    inputs: Mapping[str, Inputs] = {}
    notes: Texts = ()
    warnings: Texts = ()
    own: Facts = {}


class Audit(Recorded):
    """Labels of a split; `counts`: of each class, `columns`: of each of several. In `own` are numbers by name."""

    alarms: Texts = ()
    counts: Counts = {}
    columns: Mapping[str, Audit] = {}
    own: Facts = {}


# --- the run ----------------------------------------------------------------------------------------------------------


class ModelRecord(Recorded):
    """The model; in `own` is what its task adds."""

    class_: str = ""
    num_parameters: Number = None
    num_trainable: Number = None
    own: Facts = {}


class Base(Recorded):
    """A pretrained model under it, and the columns that each of its inputs joins."""

    encoder: str = ""
    revision: Text = None
    training: Text = None
    pooling: Text = None
    inputs: Sequence[Texts] = ()


class Environment(Recorded):
    """Where it trained; versions of packages by name."""

    device: str = ""
    num_processes: int = 1
    versions: Facts = {}


class Costs(Recorded):
    """Seconds and memory, of all sessions of the run; `memory_of`: "process" or "device".

    `phases`: of this session, before the report, what `end_phases` returns; of folds and seeds of all runs, final
    models as one.
    """

    wall_s: Number = None
    train_s: Number = None
    num_sessions: Number = None
    peak_memory_gib: Number = None
    memory_of: str = ""
    phases: Facts = {}


class EarlyStopping(Recorded):
    """What early stopping waited for, and did; `decisions` as `StoppingDecision.as_dict`."""

    patience: Number = None
    stopped_at_step: Number = None
    decisions: Sequence[Facts] = ()


class AlarmRecord(Recorded):
    """What an evaluation while training alarmed about; `name`: of its data set, where there are several."""

    step: Number = None
    name: str = ""
    alarms: Texts = ()


class CommonRecord(Recorded):
    """What every run writes, whatever it trains.

    Attributes:
        format: of the file.
        created, command, seed, trainer: when, how and by which class it was trained.
        train: metrics of training, by name.
        best: `step` of the best model, and under its name the metric that chose it.
        settings, settings_from: arguments by name, and where each that is not the default came from.
        own: what the task adds, by name; `RunRecord` knows what tasks share of it.
    """

    format: Number = None
    created: str = ""
    command: str = ""
    seed: Number = None
    trainer: str = ""
    model: ModelRecord = ModelRecord()
    train: Facts = {}
    best: Facts = {}
    settings: Facts = {}
    settings_from: Facts = {}
    environment: Environment = Environment()
    costs: Costs = Costs()
    own: Facts = {}

    @property
    def label_name(self) -> str:
        """The label columns, as one name."""
        return ", ".join(self.settings.get("label_column") or ["label"])

    @property
    def sequence_columns(self) -> list[str]:
        """What the model reads; empty where that was not recorded."""
        return [*(self.settings.get("sequence_columns") or [])]

    @property
    def chosen_by(self) -> str:
        """The metric of the best model."""
        return str(self.settings.get("metric_for_best_model")).removeprefix("eval_")


class RunRecord(CommonRecord):
    """All of `all_results.json`.

    Attributes:
        alarms: of evaluations while a `FastTrainer` trained.
        early_stopping: None where it was off.
        label_kind: `LabelKind.state()`, of other labels than a number per row.
        labels: split -> its labels.
        requirements: that scores had to meet, see `hf_ext.evaluation.requirements`.
        page: what the task says of the run, see `hf_ext.reporting.page.page_record`.
    """

    task: str = "affinity"
    alarms: Sequence[AlarmRecord] = ()
    early_stopping: EarlyStopping | None = None
    verdict: VerdictRecord = VerdictRecord()
    label_kind: Facts = {}
    requirements: Sequence[Facts] = ()
    test: SplitRecord = SplitRecord()
    validation: SplitRecord = SplitRecord()
    data: DataRecord = DataRecord()
    labels: Mapping[str, Audit] = {}
    advice: Texts = ()
    page: Facts = {}

    @property
    def is_demo(self) -> bool:
        """Tells whether the run trained on generated demo data."""
        return self.data.source is None

    @property
    def kind(self) -> LabelKind:
        """What the run's model predicts.

        Raises:
            DataError: the record names no kind of this hf_ext.
        """
        try:
            return kind_from_state(self.label_kind)
        except (KeyError, TypeError) as error:
            raise DataError(f"label_kind {self.label_kind}: no kind of label of this hf_ext. Train again.") from error


# --- files beside it --------------------------------------------------------------------------------------------------


class DecisionRecord(Recorded):
    """What the plan decided about a speed-up, see `hf_ext.speedups.base.Decision`."""

    name: str = ""
    status: str = ""
    kind: str = ""
    reason: str = ""
    evidence: Facts = {}


class PlanRecord(Recorded):
    """What `plan.json` holds; `facts` of model and data by name."""

    preset: Text = None
    hardware: Facts = {}
    versions: Facts = {}
    facts: Mapping[str, Facts] = {}
    decisions: Sequence[DecisionRecord] = ()


class StateRecord(Recorded):
    """What `trainer_state.json` holds of a run."""

    global_step: Number = None
    log_history: Sequence[Facts] = ()


class Throughput(Recorded):
    """What `throughput.json` holds; `rates` and `totals` by name, see `ThroughputCallback`."""

    format: int = 1
    unit: str = ""
    device: str = ""
    compute_dtype: str = ""
    num_processes: int = 1
    measured_steps: int = 0
    warmup_steps: int = 0
    warmup_seconds: float = 0
    seconds_before_training: float = 0
    steps_per_epoch: Number = None
    rates: Facts = {}
    totals: Facts = {}
    peak_memory_gib: float = 0
    no_mfu_because: Text = None
    log_history: Sequence[Facts] = ()


# --- JSON -------------------------------------------------------------------------------------------------------------

# What a field may hold -> what JSON has for it, and how a message says that.
FORMS: dict[Any, tuple[Any, str]] = {
    Mapping: (Mapping, "an object"),
    Sequence: ((list, tuple), "a list"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
}
_LEFT_OUT = object()


def to_json(record: object) -> Any:
    """Returns a record as JSON has it: its fields in their order, then those of `own`; anything else as it is."""
    if not isinstance(record, Recorded):
        return record
    named = {name.rstrip("_"): to_json(value) for name, value in vars(record).items()}
    own = named.pop("own", {})
    return {**named, **own}


def from_json(kind: type[Read], value: object, where: object = "The record of the run") -> Read:
    """Reads a record.

    Args:
        value: what JSON gave, or a run will write; None is a record without anything.
        where: file and key, for the log.

    Returns:
        The record. What is of another type than it must be has its default, and a warning names file and key.
    """
    record = _read(kind, value, where)
    return record if isinstance(record, kind) else kind()


def _read(hint: Any, value: object, where: object) -> Any:
    """Returns the value as a field has it; `_LEFT_OUT` for another type, which the log says, or for none."""
    (hint, *other) = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = get_origin(hint) or hint
    is_record = issubclass(kind, Recorded)
    value = kind.read_other(value) if is_record else value
    if value is None or kind is Any:
        return value if other or kind is Any else _LEFT_OUT
    types, form = FORMS.get(Mapping if is_record else kind, ((int, float), "a number"))
    if not isinstance(value, types):
        logger.warning("%s is left out: %s is needed, %s is there.", where, form, type(value).__name__)
        return _LEFT_OUT
    if is_record:
        hints = _hints(kind)
        names = {name.rstrip("_"): name for name in hints}
        known = read_items(hints, {names[key]: value[key] for key in names if key in value}, where)
        if "own" in hints:
            known["own"] = {key: item for key, item in value.items() if key not in names}
        return kind(**known)
    of_items = get_args(hint)[-1:]
    if isinstance(value, Mapping):
        return read_items(dict.fromkeys(value, *of_items), value, where)
    if isinstance(value, list | tuple):
        items = dict(enumerate(value, 1))
        return [*read_items(dict.fromkeys(items, *of_items), items, where).values()]
    return value


def read_items(hints: Mapping[Any, Any], items: Mapping[Any, Any], where: object) -> dict[Any, Any]:
    """Reads values by their types' hints, as `from_json` does; KeyError of a key without one."""
    found = {key: _read(hints[key], item, f"{where}, {key}") for key, item in items.items()}
    return {key: item for key, item in found.items() if item is not _LEFT_OUT}


_hints = cache(get_type_hints)
