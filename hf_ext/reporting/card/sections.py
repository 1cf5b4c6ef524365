"""The parts of a card about what the model is, its training and its licence."""

from __future__ import annotations

from typing import Any

from ...arguments.names import is_secret
from .. import units
from ..markdown import code, code_block, plain
from ..report.run_files import RunFiles
from ..report.values import as_dict
from ..tables import format_markdown_table
from .facts import data_source, has_licence_file
from .names import link_name, show_argument, show_command
from .tasks import TaskCard

# Beginning of an id -> what its authors ask to be cited as.
_PAPERS = {
    "facebook/esm2_": "Lin et al. 2023, https://doi.org/10.1126/science.ade2574",
    "facebook/esm1b_": "Rives et al. 2021, https://doi.org/10.1073/pnas.2016239118",
    "Exscientia/Ig": "Kenlay et al. 2024, https://arxiv.org/abs/2403.17889",
    "Rostlab/prot_": "Elnaggar et al. 2021, https://doi.org/10.1109/TPAMI.2021.3095381",
}
_POOLINGS = {
    "mean": "mean over residues",
    "mean_tokens": "mean over all tokens, special ones too",
    "cls": "first token",
    "max": "maximum over residues",
}
_CLASSES = {"I": "same mathematics", "N": "other numerics", "L": "changes learning"}


def model_section(task: TaskCard) -> list[str]:
    """Markdown: what it predicts from what, and what it is made of."""
    rows = [
        [plain(_inputs(base)), link_name(base["encoder"], base.get("revision")), *map(_word, _how(base))]
        for base in task.bases()
    ]
    table = [format_markdown_table(rows, ["reads", "pretrained model", "training", "pooling"]), ""] if rows else []
    size = _size(as_dict(task.run.results.get("model")))
    return [f"## {task.heading}", "", *task.description(), size, "", *table]


def _size(model: dict[str, Any]) -> str:
    total, trained = model.get("num_parameters"), model.get("num_trainable")
    of = "" if total == trained else f" of {units.number(total)}"
    return f"{units.number(trained)}{of} parameters were trained."


def _how(base: dict[str, Any]) -> tuple[Any, Any]:
    pooling = base.get("pooling")
    return base.get("training"), _POOLINGS.get(str(pooling), pooling)


def _word(value: Any) -> str | None:
    return None if value is None else plain(value)


def _inputs(base: dict[str, Any]) -> str:
    return ", ".join("+".join(columns) for columns in base.get("inputs") or []) or "masked sequences"


def training_section(run: RunFiles) -> list[str]:
    """Markdown: how it was trained, in which time, on what, and the command that repeats it."""
    record = run.results
    lines = ["## Training", "", *_course(record), *_teacher(record), *_cost(record)]
    applied = [d for d in run.plan.get("decisions") or [] if d.get("status") == "applied"]
    if applied:
        names = [f"{plain(d['name'])} ({_CLASSES.get(d.get('kind'), 'unknown class')})" for d in applied]
        lines.append(f"Speed-ups in use: {', '.join(names)}.")
    if record.get("command"):
        lines += ["", code_block(show_command(record["command"]), "bash")]
    return [*lines, "", *_arguments(run), *_versions(record)]


def _course(record: dict[str, Any]) -> list[str]:
    train, best = as_dict(record.get("train")), as_dict(record.get("best"))
    parts = [f"{train['epoch']:g} epochs"] if "epoch" in train else []
    parts += [f"training loss {units.number(train['train_loss'])}"] if train.get("train_loss") is not None else []
    parts += [f"best evaluation at step {best['step']}"] if best.get("step") else []
    parts += [f"seed {record['seed']}"] if record.get("seed") is not None else []
    return [f"{', '.join(parts)}."] if parts else []


def _teacher(record: dict[str, Any]) -> list[str]:
    distillation = as_dict(record.get("distillation"))
    if not distillation:
        return []
    share = units.number(distillation.get("alpha"))
    return [f"It learned from the predictions of {link_name(str(distillation['teacher']))}, whose share is {share}."]


def _cost(record: dict[str, Any]) -> list[str]:
    costs, machine = as_dict(record.get("costs")), as_dict(record.get("environment"))
    if not costs:
        return []
    device = plain(machine.get("device", "a device that was not recorded"))
    lines = (
        f"Training took {units.seconds(costs.get('train_s'))} ({units.seconds(costs.get('wall_s'))} with loading and "
        f"scoring) on {machine.get('num_processes') or 1} x {device}; "
        f"peak memory of the {costs.get('memory_of', 'process')} {units.gib(costs.get('peak_memory_gib'))}"
    )
    money = costs.get("dollars")
    return [lines + (f"; {units.dollars(money)}." if money is not None else ".")]


def _arguments(run: RunFiles) -> list[str]:
    rows = [
        [code(name), plain(show_argument(name, run.settings.get(name))), plain(origin)]
        for name, origin in as_dict(run.results.get("settings_from")).items()
        if not is_secret(name)
    ]
    if not rows:
        return []
    table = format_markdown_table(rows, ["argument", "value", "from"])
    return ["Arguments that differ from their defaults (of local paths the last part):", "", table, ""]


def _versions(record: dict[str, Any]) -> list[str]:
    machine = as_dict(record.get("environment"))
    versions = {"python": machine.get("python"), **as_dict(machine.get("versions"))}
    found = [f"{plain(name)} {plain(version)}" for name, version in versions.items() if version]
    return [f"Versions: {', '.join(found)}.", ""] if found else []


def licence_section(task: TaskCard) -> list[str]:
    """Markdown: the licence as far as the folder says one, those of others, and whom to cite."""
    run, found = task.run, task.bases()
    own = "See [LICENSE](LICENSE)." if has_licence_file(run) else "Whoever trained this model has not chosen a licence."
    data = " and of the training data" if data_source(run) else ""
    others = f" The licences of the pretrained models above{data} hold as well." if found else ""
    lines = ["## Licence and citation", "", own + others, ""]
    papers = {paper for base in found for start, paper in _PAPERS.items() if str(base["encoder"]).startswith(start)}
    lines += [f"- {paper}" for paper in sorted(papers)] + ([""] if papers else [])
    return lines
