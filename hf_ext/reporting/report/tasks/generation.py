"""A generator's result: its antibodies beside baselines, whether it reads the antigen, gates, samples."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import DataError
from ....files import read_cell
from ... import units
from ..blocks import Block, Bullets, Code, Fold, KeyNumber, Paragraph, Table
from ..run_files import RunFiles
from ..values import as_dict
from .base import TaskReport

MODEL = "model"
GENERATED = "generated.csv"
NUM_SHOWN = 8
MAX_EVALUATIONS = 200
# What was measured -> where `Judgement.as_dict` has it, and how rows are named.
_MEASURES = {
    "well_formed": ("validity", "Pairs of chains of residues"),
    "motif": ("validity", "With the pattern of conserved residues"),
    "numbered": ("validity", "Numbered as variable domains"),
    "strict": ("validity", "Strictly valid variable domains"),
    "unique_pairs": ("diversity", "Unique pairs"),
    "unique_cdr3": ("diversity", "Unique CDR-H3"),
    "identity_within": ("diversity", "Identity of two heavy chains for one antigen"),
    "identity_across": ("diversity", "Identity of two heavy chains for two antigens"),
    "memorised": ("novelty", "Training antibodies to the residue"),
    "near_copies": ("novelty", "95 % identical to training chains"),
    "nearest_heavy": ("novelty", "Heavy chain's identity to the nearest in training"),
    "nearest_cdr3": ("novelty", "CDR-H3's identity to the nearest in training"),
    "cdr3_recovery": ("recovery", "CDR-H3 recovery"),
    "heavy_recovery": ("recovery", "Heavy chain's identity to a binder"),
    "light_recovery": ("recovery", "Light chain's identity to a binder"),
    "humanness": ("", "OASis humanness"),
    "share_above": ("affinities", "Predicted above the affinity threshold"),
    "correlation": ("affinities", "Spearman of asked-for and predicted affinity"),
}
_SAMPLED = "sampled_"  # what an evaluation logs of its samples
_SAID = {True: "passed", False: "FAILED", None: "does not apply"}


class GenerationReport(TaskReport):
    def title(self) -> str:
        """What is written for what."""
        named = self.run.settings.get("antigen_column")
        return "Generating antibodies" + (f" for {named}" if named else "")

    def alarms(self) -> list[str]:
        return failed_gates(self.run)

    def score_numbers(self) -> list[KeyNumber]:
        return _key_numbers(self.run)

    def result_blocks(self) -> list[Block]:
        return _blocks(self.run)


def generation_scores(run: RunFiles) -> dict[str, dict[str, Any]]:
    """Set of antibodies ("model", each baseline, what was held out) -> measure -> score; without what nobody measured.

    Measures are named as `measure_title` takes them.
    """
    return find_scores(as_dict(as_dict(run.results.get("generation")).get("sets")))


def find_scores(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same, of what `generation.sets` of a run's results holds."""
    scores = {name: {measure: _find(as_dict(one), measure) for measure in _MEASURES} for name, one in sets.items()}
    there = [measure for measure in _MEASURES if any(each[measure] for each in scores.values())]
    return {name: {measure: each[measure] for measure in there if each[measure]} for name, each in scores.items()}


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """A row per measure, a column per set of antibodies; `scores` as `find_scores` gives them."""
    names = dict.fromkeys(measure for each in scores.values() for measure in each)
    return [
        [measure_title(name), *(units.score(each[name]) if name in each else units.MISSING for each in scores.values())]
        for name in names
    ]


def measure_title(measure: str) -> str:
    """What a row of scores is called."""
    return _MEASURES[measure][1]


def _find(one: Mapping[str, Any], measure: str) -> dict[str, Any]:
    part = _MEASURES[measure][0]
    name = measure.removeprefix("nearest_") if part == "novelty" else measure.removesuffix("_recovery")
    return as_dict((as_dict(one.get(part)) if part else one).get(name))


def _key_numbers(run: RunFiles) -> list[KeyNumber]:
    """Validity, uniqueness, copies, recovery beside the hardest baseline, and what the antigen is worth."""
    scores = generation_scores(run)
    model = scores.get(MODEL)
    if not model:
        return [KeyNumber("valid antibodies", units.NOT_MEASURED, "no outputs were judged")]
    strictest, note = ("strict", "by numbering") if "strict" in model else ("motif", "by patterns, not by numbering")
    numbers = [
        KeyNumber("valid antibodies", units.score(model.get(strictest)), note),
        KeyNumber("unique pairs", units.score(model.get("unique_pairs")), "share of outputs"),
        KeyNumber("training antibodies", units.score(model.get("memorised")), "share of outputs, to the residue"),
    ]
    if "cdr3_recovery" in model:
        others = {name: as_dict(each.get("cdr3_recovery")) for name, each in scores.items() if name != MODEL}
        known = {name: one["value"] for name, one in others.items() if units.is_finite(one.get("value"))}
        best = max(known, key=lambda name: known[name]) if known else None
        note = f"best baseline: {units.number(known[best])}, {best}" if best else "no baseline to compare with"
        numbers.append(KeyNumber("CDR-H3 recovery", units.score(model["cdr3_recovery"]), note))
    for effect in _effects(run):
        saved = _as_score(as_dict(effect.get("comparison")))
        note = f"nats per token that shuffling it costs: {effect.get('reading')}"
        numbers.append(KeyNumber(f"worth of the {effect.get('condition')}", units.score(saved), note))
    return numbers


def failed_gates(run: RunFiles) -> list[str]:
    """A sentence for each gate that failed."""
    gates = [as_dict(gate) for gate in run.results.get("gates") or []]
    stage = run.results.get("stage")
    return [f"Gate {g.get('name')} of stage {stage}: {g.get('reason')}" for g in gates if g.get("passed") is False]


def effect_sentence(effect: Mapping[str, Any]) -> str:
    """Whether the model reads a condition, as a sentence of its own."""
    text = str(effect.get("text"))
    return f"It is {text}." if text.startswith("not known") else f"The model {text}."


def _blocks(run: RunFiles) -> list[Block]:
    """Findings, scores beside baselines, differences to these, conditions, gates, the course of sampling, a gallery."""
    scores = generation_scores(run)
    if not scores:
        return [Paragraph("Not measured: the run judged no outputs.")]
    found = as_dict(run.results.get("generation"))
    findings = [str(as_dict(one).get("text")) for one in as_dict(found.get("verdict")).get("findings") or []]
    blocks: list[Block] = [Bullets([units.capitalize(f"{text}.") for text in findings])] if findings else []
    num = as_dict(as_dict(found.get("sets")).get(MODEL)).get("num_rows")
    caption = f"{units.number(num)} antibodies of each kind for the same test antigens. In brackets: intervals."
    blocks.append(Table(["", *scores], score_rows(scores), caption, highlight=MODEL))
    blocks += _comparison_blocks(as_dict(found.get("comparisons")))
    effects = [effect_sentence(effect) for effect in _effects(run)]
    blocks += [Bullets([*effects, *(str(note) for note in found.get("notes") or [])])]
    blocks += [*_fault_blocks(found), *_memory_blocks(found)]
    return [*blocks, *_gate_blocks(run), *_sampled_blocks(run), *_gallery(run)]


def _effects(run: RunFiles) -> list[dict[str, Any]]:
    return [as_dict(one) for one in as_dict(run.results.get("generation")).get("effects") or []]


def _as_score(comparison: Mapping[str, Any]) -> dict[str, Any]:
    return {**comparison, "value": comparison.get("improvement")}


def _comparison_blocks(comparisons: Mapping[str, Any]) -> list[Block]:
    baselines = list(dict.fromkeys(name for each in comparisons.values() for name in as_dict(each)))
    if not baselines:
        return []
    rows: list[list[object]] = [
        [measure, *(units.score(_as_score(as_dict(as_dict(each).get(name)))) for name in baselines)]
        for measure, each in comparisons.items()
    ]
    caption = "The model less each baseline, on the same antigens; better only where the whole interval is above 0."
    return [Table(["", *baselines], rows, caption)]


def _fault_blocks(found: Mapping[str, Any]) -> list[Block]:
    """What outputs fail at, the most frequent first."""
    problems = as_dict(as_dict(as_dict(found.get("sets")).get(MODEL)).get("validity")).get("problems") or []
    if not problems:
        return []
    listed = "; ".join(f"{text} ({units.number(num)})" for text, num in problems)
    return [Paragraph(f"What outputs fail at, with their numbers: {listed}.")]


def _memory_blocks(found: Mapping[str, Any]) -> list[Block]:
    """How well training rows are known: what stage 1 asks for, and what no later stage should be proud of."""
    loss, reproduced = found.get("train_token_loss"), as_dict(found.get("reproduced"))
    if loss is None and not reproduced:
        return []
    text = (
        f"On training rows, in evaluation mode: {units.number(loss)} nats per token; greedy decoding writes "
        f"{units.share(reproduced.get('share'))} of the training antibodies that were tried to the residue."
    )
    return [Paragraph(text)]


def _gate_blocks(run: RunFiles) -> list[Block]:
    gates = [as_dict(gate) for gate in run.results.get("gates") or []]
    if not gates:
        return []
    rows: list[list[object]] = [
        [g.get("name"), _SAID.get(g.get("passed"), "-"), units.format_cell(g.get("value")), g.get("reason")]
        for g in gates
    ]
    passed = "passed" if run.results.get("gates_passed") else "did not pass"
    caption = f"Stage {run.results.get('stage')} {passed} its gates."
    return [Table(["gate", "", "value", "why"], rows, caption)]


def _sampled_blocks(run: RunFiles) -> list[Block]:
    """Shares of the few antibodies that each evaluation wrote."""
    entries = [entry for entry in run.log_history if any(name.startswith(_SAMPLED) for name in entry)]
    names = list(dict.fromkeys(name for entry in entries for name in entry if name.startswith(_SAMPLED)))
    rows: list[list[object]] = [
        [units.number(entry.get("step")), units.number(entry.get("epoch")), *(units.share(entry.get(n)) for n in names)]
        for entry in entries[-MAX_EVALUATIONS:]
    ]
    if not rows:
        return []
    table = Table(["step", "epoch", *(name.removeprefix(_SAMPLED) for name in names)], rows)
    return [Fold("Antibodies written at each evaluation, always for the same antigens", [table])]


def _gallery(run: RunFiles) -> list[Block]:
    """The first outputs as they came; training antibodies are not shown: a report may be shared, data may not."""
    path = run.folder / GENERATED
    if not path.is_file():
        return []
    lines = _read_generated(path)
    numbers = {antigen: i for i, antigen in enumerate(dict.fromkeys(line["antigen"] for line in lines), 1)}
    rows: list[list[object]] = []
    for line in lines[:NUM_SHOWN]:
        is_copy = line["is_training_pair"] == "True"
        chains = ["a training antibody, not shown", ""] if is_copy else [Code(line["heavy"]), Code(line["light"])]
        valid = "yes" if line["is_valid"] == "True" else "no"
        fault = line["malformed"] or ("" if valid == "yes" else "see the faults above")
        antigen = f"{numbers[line['antigen']]} ({len(line['antigen'])} residues)"
        rows.append([antigen, *chains, valid, fault, _known(line["nearest_training_heavy"])])
    caption = f"The first {len(rows)} of {len(lines):,} outputs, not chosen. All are in {GENERATED}."
    headers = ["antigen", "heavy", "light", "valid", "fault", "identity to the nearest training heavy chain"]
    return [Fold("Samples", [Table(headers, rows, caption)])] if rows else []


def _read_generated(path: Path) -> Sequence[Mapping[str, str]]:
    needed = {"antigen", "heavy", "light", "malformed", "is_valid", "nearest_training_heavy", "is_training_pair"}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not needed <= {*(reader.fieldnames or ())}:
            raise DataError(f"{path}: lacks columns {sorted(needed - {*(reader.fieldnames or ())})}. Remove the file.")
        return [{name: read_cell(cell or "") for name, cell in row.items() if name in needed} for row in reader]


def _known(cell: str) -> str:
    try:
        value = float(cell)
    except ValueError:
        return "-"
    return units.format_cell(value) if units.is_finite(value) else "-"
