"""What a stage leaves behind: scores, gates, what was written, plots; and what makes it fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunEnded
from ..processes.team import do_on_main
from ..reporting.tables import format_table
from ..reporting.units import format_cell
from ..tasks.running import with_absolute_path
from .arguments import GeneratorArguments
from .building import Inputs
from .judging.gates import GATES_NAME, REQUIREMENTS, Gate, check_gates, have_passed, write_gates
from .judging.judgement import Judgement, Judges
from .judging.rows import AntibodyRows
from .measuring import judge, measure_effects, measure_reproduced, measure_training_loss
from .preparing import PairData
from .sample_table import write_csv

BEST_METRIC = "token_loss"
GENERATED = "generated.csv"
NUM_SHOWN = 8  # outputs in the report


class GatesFailed(RunEnded):
    """A stage did not reach what the next one needs; everything was written, `gates.json` says which gate failed."""


def measure(
    trainer: Any, stage: int, args: GeneratorArguments, data: PairData, inputs: Inputs, judges: Judges
) -> tuple[dict[str, Any], str]:
    """Measures everything that is said of the trained model, and holds it against the stage's gates.

    All processes call it; the main one writes antibodies, judges them, and leaves `generated.csv` and `gates.json`.

    Returns:
        What `all_results.json` says of it, and the same for a terminal: verdict, tables, gates.
    """
    token_loss = measure_training_loss(trainer, data, inputs)
    effects = measure_effects(trainer, data, inputs)
    seed, model, folder = trainer.args.seed, trainer.model, Path(str(trainer.args.output_dir))

    def judge_outputs() -> tuple[dict[str, Any], str]:
        reproduced = measure_reproduced(model, data, inputs, args.num_reproduced, seed)
        judgement, written, asked = judge(model, data, inputs, args, judges, effects, seed)
        write_generated(folder / GENERATED, written, asked, judgement)
        numbers = {
            **judgement.numbers(),
            "num_errors": 0.0,  # a run with one does not come here
            "token_loss": token_loss,
            "reproduced": reproduced["share"],
            "num_validation_falls": count_validation_falls(trainer.state.log_history),
        }
        # Gates that a run without affinities cannot have; a discriminator that is missing is no excuse.
        has_none = not data.has_affinities and judges.discriminator is None
        affinity_gates = {"share_above", "correlation"} & {one.name for one in REQUIREMENTS[stage]}
        excuse = "the data have no affinities (--label_column), and no --discriminator was given"
        excused = dict.fromkeys(affinity_gates if has_none else (), excuse)
        gates = check_gates(stage, numbers, args.gates_of(stage), excused)
        write_gates(folder / GATES_NAME, {stage: gates})
        encoder = model.config.antigen_encoder or {}
        facts = {
            "stage": stage,
            "verdict": judgement.verdict.as_dict(),
            "gates": [gate.as_dict() for gate in gates],
            "gates_passed": have_passed(gates),
            "model": {
                "architecture": model.config.architecture,
                "antigen_encoder": encoder.get("name_or_path"),
                "encoder_training": encoder.get("training"),
            },
            "generation": {
                **judgement.as_dict(),
                "train_token_loss": token_loss,
                "reproduced": reproduced,
                "samples": show_samples(written, judgement),
            },
            "data": with_absolute_path(data.report, "source"),
        }
        said = {True: "passed", False: "FAILED", None: "-"}
        rows = [[gate.name, said[gate.passed], format_cell(gate.value), gate.reason] for gate in gates]
        return facts, f"{judgement.text()}\n\n{format_table(rows, ['gate', '', 'value', 'why'])}"

    return do_on_main(trainer.args, judge_outputs)


def count_validation_falls(log_history: Sequence[Mapping[str, Any]]) -> float | None:
    """How many evaluations after the first had a lower validation loss than all before; None without any.

    Not how long ago the last was: early stopping waits that long in every run, and the best model is the one kept.
    """
    losses = [entry[f"eval_{BEST_METRIC}"] for entry in log_history if f"eval_{BEST_METRIC}" in entry]
    return float(sum(loss < min(losses[:i]) for i, loss in enumerate(losses) if i)) if losses else None


def write_generated(path: Path, rows: AntibodyRows, asked: Sequence[float] | None, judgement: Judgement) -> None:
    """One line per antibody that was judged: antigen, chains, what is wrong with it, identity to the nearest of train.

    As `write_csv` for text that a spreadsheet would take for a formula.
    """
    model = judgement.sets["model"]
    columns: dict[str, Sequence[Any]] = {
        **{"antigen": rows.antigens, "heavy": rows.heavy, "light": rows.light, "malformed": rows.malformed},
        "is_valid": model.measures["valid"].tolist(),
        "nearest_training_heavy": model.measures["nearest_heavy"].tolist(),
        "is_training_pair": model.measures["is_copy"].tolist(),
    }
    if asked is not None:
        columns["asked_affinity"] = asked
    if "affinity" in model.measures:
        columns["predicted_affinity"] = model.measures["affinity"].tolist()
    write_csv(path, columns)


def show_samples(rows: AntibodyRows, judgement: Judgement) -> list[list[str]]:
    """The first outputs as rows of a table: antigen by number and length, chains, whether valid, fault, identity.

    Training antibodies are left out: a report may be shared, data may not.
    """
    measures = judgement.sets["model"].measures
    numbers = {antigen: i for i, antigen in enumerate(dict.fromkeys(rows.antigens), 1)}
    shown = []
    for i, antigen in enumerate(rows.antigens[:NUM_SHOWN]):
        chains = ["a training antibody, not shown", ""] if measures["is_copy"][i] else [rows.heavy[i], rows.light[i]]
        fault = rows.malformed[i] or ("" if measures["valid"][i] else "see what outputs fail at")
        valid, identity = "yes" if measures["valid"][i] else "no", format_cell(float(measures["nearest_heavy"][i]))
        shown.append([f"{numbers[antigen]} ({len(antigen)} residues)", *chains, valid, fault, identity])
    return shown


def save_all_gates(args: Any, folder: Path, stages: Sequence[Mapping[str, Any]]) -> None:
    """Writes `gates.json` of `--stage auto` into its folder: the gates of all stages so far. All processes call it.

    Args:
        args: of the last stage.
        folder: of `--stage auto`.
        stages: what the `all_results.json` of each holds.
    """
    gates = {results["stage"]: [Gate(**gate) for gate in results["gates"]] for results in stages}
    do_on_main(args, lambda: write_gates(folder / GATES_NAME, gates))


def check_passed(results: Mapping[str, Any]) -> None:
    """Raises GatesFailed where a stage did not pass; `results` as its `all_results.json` holds them."""
    if results["gates_passed"]:
        return
    failed = [f"{gate['name']}: {gate['reason']}" for gate in results["gates"] if gate["passed"] is False]
    listed = "; ".join(failed) or "no gate applies to this run, so none passed"
    raise GatesFailed(
        f"Stage {results['stage']} did not pass its gates ({listed}). Model and report are whole, in "
        f"{results['settings']['output_dir']}; {GATES_NAME} there has each gate. Train longer or on other data, or "
        "give a threshold of your own (--gates)."
    )
