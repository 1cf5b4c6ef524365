"""What report and card say of a run, in one order: the report lays all of it out, the card what a stranger needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..text import is_finite, units
from .charts import confusion_chart, is_drawn, position_chart, scatter_chart
from .data_section import data_blocks, data_limits
from .page import PLACEHOLDER, Block, Blocks, Code, Figures, Page, Points, Table, Text, read_page
from .record import Base, RunRecord, from_json
from .run_files import RunFiles, is_hub_id, last_part, show_source
from .run_sections import cost_blocks, plan_blocks, reproduce_blocks, training_blocks
from .scores import REQUIRED_HEADERS, default_page, required_rows

# Beginning of an id -> what its authors ask to be cited as.
PAPERS = {
    "facebook/esm2_": "Lin et al. 2023, https://doi.org/10.1126/science.ade2574",
    "facebook/esm1b_": "Rives et al. 2021, https://doi.org/10.1073/pnas.2016239118",
    "Exscientia/Ig": "Kenlay et al. 2024, https://arxiv.org/abs/2403.17889",
    "Rostlab/prot_": "Elnaggar et al. 2021, https://doi.org/10.1109/TPAMI.2021.3095381",
}


@dataclass(frozen=True)
class Section:
    """A part of both pages, or with `in_card=False` of the report alone; `id` is what links point at."""

    id: str
    title: str
    blocks: Sequence[Block]
    in_card: bool = True


@dataclass(frozen=True)
class Contents:
    """All that is said of a run, before anyone decides how it looks; sections without blocks are left out.

    `is_better`: whether the model is better than every baseline; None: undecided.
    """

    page: Page
    bases: list[Base]
    subtitle: str
    verdict: str
    is_better: bool | None
    alarms: list[str]
    numbers: list[Sequence[str]]
    sections: list[Section]


def compose(run: RunFiles, repo: str | None = None) -> Contents:
    """Puts together what a run left. Where it lacks something, the text says so or leaves it out; nothing is raised.

    Args:
        repo: OWNER/NAME of the model, where that is known.
    """
    record = run.record
    page = read_page(record.page) if record.page else default_page(record)
    bases = find_bases(run, page)
    sections = [
        Section("result", "Result", _result_blocks(run, page)),
        Section("use", "What it must not be used for", [Points(page.use)] if page.use else []),
        Section("limits", "Limits", [Points(_limits(run, page, bases))]),
        Section("model", "Model", _model_blocks(run, page, bases)),
        Section("loading", "How to load it", _loading_blocks(page, repo)),
        Section("data", "Data", data_blocks(run) if page.data is None else page.data),
        Section("training", "Training", training_blocks(run, page.training)),
        Section("plan", "Plan", plan_blocks(run), in_card=False),
        Section("cost", "Time and memory", cost_blocks(run), in_card=False),
        Section("reproduce", "How to repeat it", reproduce_blocks(run)),
        Section("licence", "Licence and citation", _licence_blocks(run, bases)),
    ]
    created = record.created.replace("T", " ")[:16]
    facts = ["Run report", record.model.class_, created and f"{created} UTC", run.folder.resolve().name]
    return Contents(
        page=page,
        bases=bases,
        subtitle=" - ".join(filter(None, facts)),
        verdict=record.verdict.text or "No verdict: this run was not compared with any baseline.",
        is_better=record.verdict.is_better,
        alarms=_alarms(record, page),
        numbers=[*page.numbers, *_run_numbers(run)],
        sections=[section for section in sections if section.blocks],
    )


def find_bases(run: RunFiles, page: Page) -> list[Base]:
    """Finds the pretrained models under this one: those that the task names, or the one that training went on from."""
    settings = run.record.settings
    name = settings.get("model_name_or_path")
    if page.bases or not name:
        return [from_json(Base, base) for base in page.bases]
    training = "lora" if settings.get("use_peft") else "full"
    return [Base(name, settings.get("model_revision"), training)]


def _alarms(record: RunRecord, page: Page) -> list[str]:
    """Returns what is wrong, in the order of weight: of the task, predictions, training, data, labels.

    Each sentence once.
    """
    alarms = [*page.alarms, *(f"Test predictions: {text}" for text in record.test.collapse.get("alarms") or ())]
    while_training: dict[str, float | None] = {}
    for entry in record.alarms:
        name = f" on {entry.name}" if entry.name else ""
        for text in entry.alarms:
            while_training.setdefault(f"{name}: {text}", entry.step)
    # The numbers in the sentences change with every evaluation, so only the first and the last are worth a line.
    listed = [f"Training, step {units.number(step)}{text}" for text, step in while_training.items()]
    alarms += [*listed[:1], *listed[1:][-1:]]
    if len(listed) > 2:
        alarms.append(f"Training: {len(listed) - 2} more alarms between these two, in run.log.")
    alarms += [f"Data: {text}" for text in record.data.warnings]
    for split, audit in record.labels.items():
        alarms += [f"Labels of {split}: {text}" for text in audit.alarms]
    return list(dict.fromkeys(alarms))


def _run_numbers(run: RunFiles) -> list[list[str]]:
    """Returns rows, time, speed, memory."""
    data = run.record.data
    train = run.record.train
    costs = run.record.costs
    planned = run.plan.facts.get("data", {})
    epochs = train.get("epoch")
    seen = ""
    if is_finite(epochs) and not data.streaming:  # a stream counts steps as epochs
        seen = "seen once" if epochs == 1 else f"seen {epochs:.3g} times"
    unit = next((name for name in ("residues", "tokens", "sequences") if f"train_{name}_per_s" in train), None)
    word = "rows" if unit == "sequences" else unit
    speed = f"at {units.rounded(train[f'train_{unit}_per_s'])} {word} / s" if unit else ""
    memory = f"of the {costs.memory_of}" if costs.memory_of else ""
    compared = []
    if "train_speed_vs_baseline" in train:
        asked = f"{run.record.settings.get('baseline_rate')} (--baseline_rate)"
        rates = f"{train['train_batches_per_s']:.3g} batches/s, {train['train_rows_per_s']:.3g} rows/s"
        compared.append(["speed", f"{train['train_speed_vs_baseline']:.2f}x the baseline", f"{rates}; against {asked}"])
    return [
        *compared,
        ["training rows", units.number(data.sizes.get("train", planned.get("num_rows"))), seen],
        ["training time", units.seconds(costs.train_s or train.get("train_runtime")), speed],
        ["peak memory", units.gib(costs.peak_memory_gib or train.get("train_peak_memory_gib")), memory],
    ]


def _result_blocks(run: RunFiles, page: Page) -> Blocks:
    """Returns how good the model is, and compared with what."""
    blocks = [*page.results] or [Text("Not measured: the run has no scores of a test split.")]
    record = run.record
    if checked := record.requirements:
        blocks.append(Table(REQUIRED_HEADERS, required_rows(checked), "Required of the final scores (--require)."))
    kind = record.kind
    charts = []
    if run.predictions and kind.chart == "scatter":
        charts.append(scatter_chart(run.predictions.labels, run.predictions.predictions, record.label_name))
        if variants := record.data.own.get("variants"):
            errors = run.predictions.predictions - run.predictions.labels
            sequences = run.predictions.columns.get(variants["column"], [])
            charts.append(position_chart(errors, sequences, variants["wild_type"]))
    elif run.predictions and is_drawn(kind):
        charts.append(confusion_chart(run.predictions.labels, run.predictions.predictions, kind.names))
    if drawn := [chart for chart in charts if chart]:
        blocks.append(Figures(drawn, run.image("scatter.png") or run.image("confusion.png")))
    if record.advice:
        blocks.append(Points(record.advice, fold="What the run suggests next"))
    return blocks


def _limits(run: RunFiles, page: Page, bases: list[Base]) -> list[str]:
    """Returns what a reader must know before using the model, the most serious first."""
    lines = [*page.limits, *data_limits(run.record.data)]
    if run.record.is_demo:
        lines.insert(0, "Trained on generated demo data: it shows that the code works, and nothing real.")
    kept = [base for base in bases if base.training != "full"] if page.needs_bases else []
    local = [last_part(base.encoder) for base in kept if not is_hub_id(base.encoder, base.revision)]
    if local:
        lines.append(
            f"It needs the weights of {units.join_words(list(dict.fromkeys(local)))}, which came from a local folder "
            "and are neither here nor on the Hub: it loads only where that folder is."
        )
    return [*lines, *([f"This is about {page.subject}."] if page.subject else [])]


def _model_blocks(run: RunFiles, page: Page, bases: list[Base]) -> Blocks:
    """Returns what it does, what it is made of, and from which weights training began."""
    model = run.record.model
    blocks: Blocks = [Text(page.summary)] if page.summary else []
    if model:
        total = units.number(model.num_parameters)
        trained = units.number(model.num_trainable)
        blocks.append(Text(f"{model.class_ or 'A model'} of {total} parameters, {trained} of them trained."))
    if not bases and "model_name_or_path" in run.record.settings:
        blocks.append(Text("Training began with random weights."))
    rows = [
        [
            ", ".join("+".join(columns) for columns in base.inputs) or "its inputs",
            show_source(base.encoder, base.revision),
            base.training,
            base.pooling or units.MISSING,
        ]
        for base in bases
    ]
    headers = ["reads", "pretrained model", "training", "pooling"]
    return [*blocks, Table(headers, rows, "Pretrained models under it.")] if rows else blocks


def _loading_blocks(page: Page, repo: str | None) -> Blocks:
    """Returns code that runs as it stands, on made-up inputs, and what else must be there."""
    if not page.loading:
        return []
    blocks: Blocks = [
        Code(block.text.replace(PLACEHOLDER, repo or PLACEHOLDER), block.language) if isinstance(block, Code) else block
        for block in page.loading
    ]
    if page.library_name:
        blocks.insert(0, Text(f"With {page.library_name} installed:"))
    if not repo:
        blocks.insert(2, Text(f"{PLACEHOLDER} is the model's id on the Hub, or the path of its folder."))
    return blocks


def _licence_blocks(run: RunFiles, bases: list[Base]) -> Blocks:
    """Returns the licence as far as the folder says one, those of others, and whom to cite."""
    lines = ["See the file LICENSE." if has_licence(run) else "Whoever trained this model has not chosen a licence."]
    if bases:
        data = " and of the training data" if data_source(run) else ""
        lines.append(f"The licences of the pretrained models{data} hold as well.")
    papers = {paper for base in bases for start, paper in PAPERS.items() if base.encoder.startswith(start)}
    return [Text(" ".join(lines)), *([Points(sorted(papers))] if papers else [])]


def has_licence(run: RunFiles) -> bool:
    return (run.folder / "LICENSE").is_file()


def data_source(run: RunFiles) -> str:
    """Returns the Hub id, file or folder that the data was read from; empty where it was generated or not recorded."""
    source = run.record.data.source or ""
    return "" if source == "generated" else source
