"""What report and card say of a generator: its antibodies beside baselines, what it reads, gates, use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..evaluation.verdict import MODEL
from ..reporting import units
from ..reporting.page import PLACEHOLDER, Block, Code, Page, Points, Table, Text
from ..reporting.run_files import as_dict
from ..reporting.scores import score_numbers
from ..reporting.units import capitalize, is_finite

EXAMPLE = "MKTAYIAKQRQISFVKSHFSRQLEE"  # made up
# What was measured -> where `Judgement.as_dict` has it, and how rows are named.
MEASURES = {
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
PASSED = {True: "passed", False: "FAILED", None: "does not apply"}


def find_scores(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Set of antibodies -> measure of `MEASURES` -> score, of `generation.sets`; without what nobody measured."""
    scores = {name: {measure: _find(as_dict(one), measure) for measure in MEASURES} for name, one in sets.items()}
    return {name: {measure: score for measure, score in each.items() if score} for name, each in scores.items()}


def _find(one: Mapping[str, Any], measure: str) -> dict[str, Any]:
    part = MEASURES[measure][0]
    name = measure.removeprefix("nearest_") if part == "novelty" else measure.removesuffix("_recovery")
    return as_dict((as_dict(one.get(part)) if part else one).get(name))


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """A row per measure that any set has, a column per set of antibodies; `scores` as `find_scores` gives them."""
    return [
        [title, *(units.score(each[name]) if name in each else units.MISSING for each in scores.values())]
        for name, (_, title) in MEASURES.items()
        if any(name in each for each in scores.values())
    ]


def describe(results: Mapping[str, Any]) -> Page:
    """The page of a run, from what its `all_results.json` holds."""
    settings, found = as_dict(results.get("settings")), as_dict(results.get("generation"))
    antigen = settings.get("antigen_column") or "antigen"
    chains = units.join_words([settings.get(name) or name[:5] for name in ("heavy_column", "light_column")])
    scores = find_scores(as_dict(found.get("sets")))
    gates = [as_dict(gate) for gate in results.get("gates") or []]
    stage = results.get("stage", "not recorded")
    architecture = as_dict(results.get("model")).get("architecture", "not recorded")
    return Page(
        title=f"Generating antibodies for {antigen}",
        summary=f"A generator of antibodies (architecture: {architecture}; of the three stages: {stage}): from the "
        f"sequence of {antigen} it writes the variable domains of an antibody ({chains}).",
        numbers=_numbers(scores, found),
        alarms=[f"Gate {g['name']} of stage {stage}: {g['reason']}" for g in gates if g["passed"] is False],
        results=[*_result_blocks(scores, found), *_gate_blocks(results, gates), *_sample_blocks(found)]
        if scores
        else [],
        limits=_limits(found),
        use=_use(scores.get(MODEL, {})),
        subject="writing sequences like those of the training antibodies, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(),
        bases=_bases(results, str(antigen)),
        needs_bases=not settings.get("save_full"),
        scores=[
            [name, MEASURES[name][1], score["value"]]
            for name, score in scores.get(MODEL, {}).items()
            if is_finite(score.get("value"))
        ],
        tags=["biology", "protein", "protein-language-model", "antibody-generation"],
        library_name="hf_ext",
        task_type="text-generation",
        task_name="Antibodies for an antigen",
    )


def _numbers(scores: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[list[str]]:
    """Validity, uniqueness, copies, recovery beside the hardest baseline, and what the antigen is worth."""
    model = scores.get(MODEL)
    if not model:
        return [["valid antibodies", units.NOT_MEASURED, "no outputs were judged"]]
    strictest, note = ("strict", "by numbering") if "strict" in model else ("motif", "by patterns, not by numbering")
    numbers = [
        ["valid antibodies", units.score(model.get(strictest)), note],
        ["unique pairs", units.score(model.get("unique_pairs")), "share of outputs"],
        ["training antibodies", units.score(model.get("memorised")), "share of outputs, to the residue"],
    ]
    if "cdr3_recovery" in model:
        beside = {"scores": scores, "baselines": [name for name in scores if name != MODEL]}
        numbers.append(["CDR-H3 recovery", *score_numbers(beside, ["cdr3_recovery"])[0][1:]])
    for effect in found.get("effects") or []:
        note = f"nats per token that shuffling it costs: {effect.get('reading')}"
        numbers.append([f"worth of the {effect.get('condition')}", _difference(effect.get("comparison")), note])
    return numbers


def _difference(comparison: Any) -> str:
    entry = as_dict(comparison)
    return units.score({**entry, "value": entry.get("improvement")})


def _result_blocks(scores: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[Block]:
    """Findings, scores beside baselines, differences to these, conditions, what is wrong with outputs."""
    model, comparisons = as_dict(as_dict(found.get("sets")).get(MODEL)), as_dict(found.get("comparisons"))
    caption = f"{units.number(model.get('num_rows'))} antibodies of each kind for the same test antigens."
    blocks: list[Block] = [Table(["", *scores], score_rows(scores), f"{caption} In brackets: intervals.")]
    baselines = list(dict.fromkeys(name for each in comparisons.values() for name in as_dict(each)))
    if baselines:
        rows = [
            [measure, *(_difference(as_dict(each).get(name)) for name in baselines)]
            for measure, each in comparisons.items()
        ]
        caption = "The model less each baseline, on the same antigens; better only where the whole interval is above 0."
        blocks.append(Table(["", *baselines], rows, caption, fold="Differences to each baseline"))
    effects = [str(as_dict(effect).get("text")) for effect in found.get("effects") or []]
    notes = [f"It is {text}." if text.startswith("not known") else f"The model {text}." for text in effects]
    notes += map(str, found.get("notes") or [])
    problems = as_dict(model.get("validity")).get("problems") or []
    if problems:
        listed = "; ".join(f"{text} ({units.number(num)})" for text, num in problems)
        notes.append(f"What outputs fail at, with their numbers: {listed}.")
    if found.get("train_token_loss") is not None:
        reproduced = units.share(as_dict(found.get("reproduced")).get("share"))
        notes.append(
            f"On training rows, in evaluation mode: {units.number(found['train_token_loss'])} nats per token; greedy "
            f"decoding writes {reproduced} of the training antibodies that were tried to the residue."
        )
    return [*blocks, Points(notes)]


def _gate_blocks(results: Mapping[str, Any], gates: list[dict[str, Any]]) -> list[Block]:
    rows = [[g["name"], PASSED[g["passed"]], units.format_cell(g["value"]), g["reason"]] for g in gates]
    passed = "passed" if results.get("gates_passed") else "did not pass"
    text = Text(f"Stage {results.get('stage')} {passed} its gates.")
    return [text, Table(["gate", "", "value", "why"], rows, fold="All gates")] if rows else []


def _sample_blocks(found: Mapping[str, Any]) -> list[Block]:
    rows = found.get("samples") or []
    headers = ["antigen", "heavy", "light", "valid", "fault", "identity to the nearest training heavy chain"]
    caption = f"The first {len(rows)} outputs, not chosen. All are in generated.csv."
    return [Table(headers, rows, caption, code=[1, 2], fold="Samples")] if rows else []


def _limits(found: Mapping[str, Any]) -> list[str]:
    findings = [as_dict(one) for one in as_dict(found.get("verdict")).get("findings") or []]
    wrong = [one for one in findings if one.get("is_failure") or one.get("kind") in ("undecided", "discriminator")]
    return [capitalize(f"{one.get('text')}.") for one in wrong]


def _use(model: Mapping[str, Any]) -> list[str]:
    copies = "How often it does was not measured."
    if is_finite(as_dict(model.get("memorised")).get("value")):
        exact, near = (units.score(model.get(name)) for name in ("memorised", "near_copies"))
        copies = (
            f"Share of its outputs for test antigens that are a training pair to the residue: {exact}; with both "
            f"chains 95 % identical to training chains: {near}."
        )
    return [
        "No therapeutic, diagnostic or other clinical use, and no decision about a patient or an animal. Nothing here "
        "says that an output binds, folds, can be made, is stable, is not toxic or is not immunogenic.",
        "Not validated in a laboratory: no output of this model was made or measured. Scores are computed from "
        "sequences; a predicted affinity is another model's guess. An output is a sequence to examine by experiment, "
        "under the rules that hold for such work where you are.",
        f"It may reproduce training antibodies, and with them whatever rights are in these. {copies} Compare outputs "
        "with the training data before you use them.",
        "Not for antigens unlike those of its training data without a test of your own, and not for designing anything "
        "meant to harm.",
    ]


def _loading() -> list[Block]:
    lines = [
        "from hf_ext.generation.generator import load_generator",
        "from hf_ext.generation.sampling import sample_pairs",
        "",
        f'generator = load_generator("{PLACEHOLDER}")',
        f'(samples,) = sample_pairs(generator.model, generator.tokenizer, ["{EXAMPLE}"], num_samples=5)',
        "for one in samples:",
        "    print(one.pair.heavy, one.pair.light, one.pair.malformed, one.log_probability)",
    ]
    text = "Outputs may be malformed, invalid or copies of training antibodies. This marks them, and ranks the rest:"
    command = f"hf-ext sample --model {PLACEHOLDER} --dataset_name antigens.fasta --training_data pairs.csv"
    return [Code("\n".join(lines), "python"), Text(text), Code(command)]


def _bases(results: Mapping[str, Any], antigen: str) -> list[dict[str, Any]]:
    """The pretrained encoder of antigens."""
    model, settings = as_dict(results.get("model")), as_dict(results.get("settings"))
    name = model.get("antigen_encoder") or settings.get("antigen_encoder")
    if not name:
        return []
    training = model.get("encoder_training") or settings.get("encoder_training") or "frozen"
    revision = settings.get("antigen_encoder_revision")
    return [{"encoder": name, "revision": revision, "training": training, "inputs": [[antigen]]}]
