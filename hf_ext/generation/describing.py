"""What report and card say of a generator: its antibodies beside baselines, what it reads, gates, use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..evaluation import MODEL
from ..files import Facts, Json
from ..reporting import (
    PLACEHOLDER,
    Block,
    Code,
    Page,
    Points,
    RunRecord,
    SplitRecord,
    Table,
    Text,
    from_json,
    score_numbers,
)
from ..text import capitalize, is_finite, units

EXAMPLE = "MKTAYIAKQRQISFVKSHFSRQLEE"  # made up
RECOVERY = "cdr3_recovery"
MEASURES = {  # of a set of antibodies -> how its row is named
    "valid": "With the pattern of conserved residues",
    "unique_pairs": "Unique pairs",
    "unique_cdr3": "Unique CDR-H3",
    "memorised": "Training antibodies to the residue",
    "nearest_heavy": "Heavy chain's identity to the nearest in training",
    "nearest_cdr3": "CDR-H3's identity to the nearest in training",
    RECOVERY: "CDR-H3 recovery",
    "share_above": "Predicted above the affinity threshold",
    "correlation": "Spearman of asked-for and predicted affinity",
}
PASSED = {True: "passed", False: "FAILED", None: "does not apply"}


def score_rows(sets: Mapping[str, Facts]) -> list[list[object]]:
    """Returns a row per measure that any set of antibodies has, and a column per set; `sets`: of `judge_generated`."""
    return [
        [title, *(units.score(each[name]) if name in each else units.MISSING for each in sets.values())]
        for name, title in MEASURES.items()
        if any(name in each for each in sets.values())
    ]


def gate_rows(gates: Sequence[Facts]) -> list[list[object]]:
    """Returns a row per gate of a stage: its name, whether it passed, its value and why."""
    return [[gate["name"], PASSED[gate["passed"]], units.format_cell(gate["value"]), gate["reason"]] for gate in gates]


def describe(run: RunRecord) -> Page:
    """Returns the page of a run, from what its `all_results.json` holds."""
    settings = run.settings
    found = run.own["generation"]
    gates = run.own["gates"]
    stage = run.own["stage"]
    antigen = settings["antigen_column"]
    sets = found["sets"]
    chains = units.join_words([settings[name] for name in ("heavy_column", "light_column") if settings[name]])
    return Page(
        title=f"Generating antibodies for {antigen}",
        summary=f"A generator of antibodies (architecture: {run.model.own['architecture']}; of the three stages: "
        f"{stage}): from the sequence of {antigen} it writes the variable domains of an antibody ({chains}).",
        numbers=_numbers(sets, found),
        alarms=[f"Gate {g['name']} of stage {stage}: {g['reason']}" for g in gates if g["passed"] is False],
        results=[*_result_blocks(sets, found), *_gate_blocks(run.own)],
        limits=[capitalize(f"{text}.") for text in run.verdict.own["limits"]],
        use=_use(sets[MODEL]),
        subject="writing sequences like those of the training antibodies, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(),
        bases=_bases(settings),
        needs_bases=not settings["save_full"],
        scores=[
            [name, title, sets[MODEL][name]["value"]]
            for name, title in MEASURES.items()
            if name in sets[MODEL] and is_finite(sets[MODEL][name]["value"])
        ],
        tags=["biology", "protein", "protein-language-model", "antibody-generation"],
        library_name="hf_ext",
        task_type="text-generation",
        task_name="Antibodies for an antigen",
    )


def _numbers(sets: Mapping[str, Facts], found: Facts) -> list[list[str]]:
    """Returns validity, uniqueness, copies, recovery beside the hardest baseline, and what the antigen is worth."""
    model = sets[MODEL]
    numbers = [
        ["valid antibodies", units.score(model["valid"]), "by patterns, not by numbering"],
        ["unique pairs", units.score(model["unique_pairs"]), "share of outputs"],
        ["training antibodies", units.score(model["memorised"]), "share of outputs, to the residue"],
    ]
    beside = from_json(SplitRecord, {name: {RECOVERY: each.get(RECOVERY)} for name, each in sets.items()})
    numbers.append(["CDR-H3 recovery", *score_numbers(beside, [RECOVERY])[0][1:]])
    for effect in found["effects"]:
        saved = units.score({**effect["comparison"], "value": effect["comparison"]["improvement"]})
        note = f"nats per token that shuffling it costs: {effect['reading']}"
        numbers.append([f"worth of the {effect['condition']}", saved, note])
    return numbers


def _result_blocks(sets: Mapping[str, Facts], found: Facts) -> list[Block]:
    """Scores beside baselines, conditions, what is wrong with outputs."""
    model = sets[MODEL]
    caption = f"{model['num_rows']:,} antibodies of each kind for the same test antigens. In brackets: intervals."
    table = Table(["", *sets], score_rows(sets), caption)
    effects = [effect["text"] for effect in found["effects"]]
    notes = [f"It is {text}." if text.startswith("not known") else f"The model {text}." for text in effects]
    notes += found["notes"]
    if model["problems"]:
        listed = "; ".join(f"{text} ({units.number(num)})" for text, num in model["problems"])
        notes.append(f"What outputs fail at, with their numbers: {listed}.")
    notes.append(
        f"On training rows, in evaluation mode: {units.number(found['train_token_loss'])} nats per token; greedy "
        f"decoding writes {units.share(found['reproduced']['share'])} of the training antibodies that were tried, to "
        "the residue."
    )
    return [table, Points(notes)]


def _gate_blocks(found: Facts) -> list[Block]:
    passed = "passed" if found["gates_passed"] else "did not pass"
    text = Text(f"Stage {found['stage']} {passed} its gates.")
    return [text, Table(["gate", "", "value", "why"], gate_rows(found["gates"]), fold="All gates")]


def _use(model: Facts) -> list[str]:
    return [
        "No therapeutic, diagnostic or other clinical use, and no decision about a patient or an animal. Nothing here "
        "says that an output binds, folds, can be made, is stable, is not toxic or is not immunogenic.",
        "Not validated in a laboratory: no output of this model was made or measured. Scores are computed from "
        "sequences; a predicted affinity is another model's guess. An output is a sequence to examine by experiment, "
        "under the rules that hold for such work where you are.",
        "It may reproduce training antibodies, and with them whatever rights are in these. Share of its outputs for "
        f"test antigens that are a training pair to the residue: {units.score(model['memorised'])}. Compare "
        "outputs with the training data before you use them.",
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


def _bases(settings: Facts) -> list[Json]:
    """Returns the pretrained encoder of antigens."""
    name = settings["antigen_encoder"]
    revision = settings["antigen_encoder_revision"]
    inputs = [[settings["antigen_column"]]]
    training = settings["encoder_training"]
    if name:
        return [{"encoder": name, "revision": revision, "training": training, "inputs": inputs}]
    return []
