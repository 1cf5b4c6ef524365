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
MEASURES = {  # of a set of antibodies -> how its row is named
    "well_formed": "Pairs of chains of residues",
    "valid": "With the pattern of conserved residues",
    "unique_pairs": "Unique pairs",
    "unique_cdr3": "Unique CDR-H3",
    "memorised": "Training antibodies to the residue",
    "near_copies": "95 % identical to training chains",
    "nearest_heavy": "Heavy chain's identity to the nearest in training",
    "nearest_cdr3": "CDR-H3's identity to the nearest in training",
    "cdr3_recovery": "CDR-H3 recovery",
    "share_above": "Predicted above the affinity threshold",
    "correlation": "Spearman of asked-for and predicted affinity",
}
PASSED = {True: "passed", False: "FAILED", None: "does not apply"}


def score_rows(sets: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """A row per measure that any set of antibodies has, a column per set; `sets` as `judge_generated` gives them."""
    return [
        [title, *(units.score(each[name]) if name in each else units.MISSING for each in sets.values())]
        for name, title in MEASURES.items()
        if any(name in each for each in sets.values())
    ]


def describe(results: Mapping[str, Any]) -> Page:
    """The page of a run, from what its `all_results.json` holds."""
    settings, found = as_dict(results.get("settings")), as_dict(results.get("generation"))
    antigen = settings.get("antigen_column") or "antigen"
    chains = units.join_words([settings.get(name) or name[:5] for name in ("heavy_column", "light_column")])
    sets = as_dict(found.get("sets"))
    model = as_dict(sets.get(MODEL))
    gates = [as_dict(gate) for gate in results.get("gates") or []]
    stage = results.get("stage", "not recorded")
    architecture = as_dict(results.get("model")).get("architecture", "not recorded")
    return Page(
        title=f"Generating antibodies for {antigen}",
        summary=f"A generator of antibodies (architecture: {architecture}; of the three stages: {stage}): from the "
        f"sequence of {antigen} it writes the variable domains of an antibody ({chains}).",
        numbers=_numbers(sets, found),
        alarms=[f"Gate {g['name']} of stage {stage}: {g['reason']}" for g in gates if g["passed"] is False],
        results=[*_result_blocks(sets, found), *_gate_blocks(results, gates), *_sample_blocks(found)] if model else [],
        limits=[capitalize(f"{text}.") for text in as_dict(results.get("verdict")).get("limits") or []],
        use=_use(model),
        subject="writing sequences like those of the training antibodies, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(),
        bases=_bases(results, str(antigen)),
        needs_bases=not settings.get("save_full"),
        scores=[
            [name, title, model[name]["value"]]
            for name, title in MEASURES.items()
            if is_finite(as_dict(model.get(name)).get("value"))
        ],
        tags=["biology", "protein", "protein-language-model", "antibody-generation"],
        library_name="hf_ext",
        task_type="text-generation",
        task_name="Antibodies for an antigen",
    )


def _numbers(sets: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[list[str]]:
    """Validity, uniqueness, copies, recovery beside the hardest baseline, and what the antigen is worth."""
    model = sets.get(MODEL)
    if not model:
        return [["valid antibodies", units.NOT_MEASURED, "no outputs were judged"]]
    numbers = [
        ["valid antibodies", units.score(model.get("valid")), "by patterns, not by numbering"],
        ["unique pairs", units.score(model.get("unique_pairs")), "share of outputs"],
        ["training antibodies", units.score(model.get("memorised")), "share of outputs, to the residue"],
    ]
    beside = {"scores": sets, "baselines": [name for name in sets if name != MODEL]}
    numbers.append(["CDR-H3 recovery", *score_numbers(beside, ["cdr3_recovery"])[0][1:]])
    for effect in found.get("effects") or []:
        note = f"nats per token that shuffling it costs: {effect.get('reading')}"
        numbers.append([f"worth of the {effect.get('condition')}", _difference(effect.get("comparison")), note])
    return numbers


def _difference(comparison: Any) -> str:
    entry = as_dict(comparison)
    return units.score({**entry, "value": entry.get("improvement")})


def _result_blocks(sets: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[Block]:
    """Scores beside baselines, differences to these, conditions, what is wrong with outputs."""
    model, comparisons = sets[MODEL], as_dict(found.get("comparisons"))
    caption = f"{units.number(model.get('num_rows'))} antibodies of each kind for the same test antigens."
    blocks: list[Block] = [Table(["", *sets], score_rows(sets), f"{caption} In brackets: intervals.")]
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
    if problems := model.get("problems"):
        listed = "; ".join(f"{text} ({units.number(num)})" for text, num in problems)
        notes.append(f"What outputs fail at, with their numbers: {listed}.")
    reproduced = units.share(as_dict(found.get("reproduced")).get("share"))
    notes.append(
        f"On training rows, in evaluation mode: {units.number(found.get('train_token_loss'))} nats per token; greedy "
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
    headers = ["antigen", "heavy", "light", "valid", "identity to the nearest training heavy chain"]
    caption = f"The first {len(rows)} outputs, not chosen. All are in generated.csv."
    return [Table(headers, rows, caption, code=[1, 2], fold="Samples")] if rows else []


def _use(model: Mapping[str, Any]) -> list[str]:
    exact, near = (units.score(model.get(name)) for name in ("memorised", "near_copies"))
    return [
        "No therapeutic, diagnostic or other clinical use, and no decision about a patient or an animal. Nothing here "
        "says that an output binds, folds, can be made, is stable, is not toxic or is not immunogenic.",
        "Not validated in a laboratory: no output of this model was made or measured. Scores are computed from "
        "sequences; a predicted affinity is another model's guess. An output is a sequence to examine by experiment, "
        "under the rules that hold for such work where you are.",
        "It may reproduce training antibodies, and with them whatever rights are in these. Share of its outputs for "
        f"test antigens that are a training pair to the residue: {exact}; with both chains 95 % identical to training "
        f"chains: {near}. Compare outputs with the training data before you use them.",
        "Not for antigens unlike those of its training data without a test of your own, and not for designing anything "
        "meant to harm.",
    ]


def _loading() -> list[Block]:
    lines = [
        "from hf_ext.generation.sampling import load_generator, sample_pairs",
        "",
        f'model, tokenizer = load_generator("{PLACEHOLDER}")',
        f'(samples,) = sample_pairs(model, tokenizer, ["{EXAMPLE}"], num_samples=5)',
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
