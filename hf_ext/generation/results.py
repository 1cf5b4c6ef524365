"""What a stage leaves behind: scores, gates, what was written, plots; and what makes it fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments.parser import FastArgumentParser
from ..distributed import do_on_main
from ..errors import RunEnded
from ..reporting.plots import plot_loss
from ..reporting.run_record import record_evaluations, record_run, write_json
from ..reporting.tables import format_table
from ..reporting.units import format_cell
from ..running import plots_if_possible, with_absolute_path
from .arguments import GeneratorArguments
from .building import Inputs
from .judging.gates import GATES_NAME, REQUIREMENTS, Gate, check_gates, have_passed, write_gates
from .judging.judgement import Judgement, Judges
from .judging.rows import AntibodyRows
from .measuring import judge, measure_effects, measure_reproduced, measure_training_loss
from .preparing import PairData
from .sample import write_csv

BEST_METRIC = "token_loss"
GENERATED = "generated.csv"


class GatesFailed(RunEnded):
    """A stage did not reach what the next one needs; everything was written, `gates.json` says which gate failed."""


@dataclass(frozen=True)
class Outcome:
    """What was measured of a stage's model.

    Attributes:
        text: for a terminal: the verdict on what it wrote, tables, gates.
        gates: of the stage.
        facts: JSON-able: both of these, and the numbers behind the gates.
    """

    text: str
    gates: list[Gate]
    facts: dict[str, Any]


def measure(
    trainer: Any, stage: int, args: GeneratorArguments, data: PairData, inputs: Inputs, judges: Judges
) -> Outcome | None:
    """Measures everything that is said of the trained model, and holds it against the stage's gates.

    All processes call it; the main one writes and judges, and alone gets the outcome.
    """
    token_loss = measure_training_loss(trainer, data, inputs)
    effects = measure_effects(trainer, data, inputs)
    if not trainer.is_world_process_zero():
        return None
    seed, model = trainer.args.seed, trainer.model
    reproduced = measure_reproduced(model, data, inputs, args.num_reproduced, seed)
    judgement, written, asked = judge(model, data, inputs, args, judges, effects, seed)
    numbers = {
        **judgement.numbers(),
        "num_errors": 0.0,  # a run with one does not come here
        "token_loss": token_loss,
        "reproduced": reproduced["share"],
        "num_validation_falls": count_validation_falls(trainer.state.log_history),
    }
    # Gates that a run without affinities cannot have; a discriminator that is missing is no excuse.
    affinity_gates = {"share_above", "correlation"} & {one.name for one in REQUIREMENTS[stage]}
    excuse = "the data have no affinities (--label_column), and no --discriminator was given"
    has_none = not data.has_affinities and judges.discriminator is None
    gates = check_gates(stage, numbers, args.gates_of(stage), dict.fromkeys(affinity_gates if has_none else (), excuse))
    write_generated(Path(str(trainer.args.output_dir)) / GENERATED, written, asked, judgement)
    facts = {
        "stage": stage,
        "verdict": judgement.verdict.as_dict(),
        "generation": {**judgement.as_dict(), "train_token_loss": token_loss, "reproduced": reproduced},
        "gates": [gate.as_dict() for gate in gates],
        "gates_passed": have_passed(gates),
    }
    said = {True: "passed", False: "FAILED", None: "-"}
    rows = [[gate.name, said[gate.passed], format_cell(gate.value), gate.reason] for gate in gates]
    return Outcome(f"{judgement.text()}\n\n{format_table(rows, ['gate', '', 'value', 'why'])}", gates, facts)


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


def save_results(
    trainer: Any,
    trained: Any,
    outcome: Outcome | None,
    data: PairData,
    settings: dict[str, Any],
    parser: FastArgumentParser,
) -> dict[str, Any]:
    """Writes `all_results.json`, `gates.json` and `loss.png` into the output folder; returns what the first holds.

    All processes call it.

    Args:
        trainer, trained: after training, and what `train` returned.
        outcome: from `measure`; None on other processes than the main one.
        data: of the stage.
        settings: model and data arguments by name; training arguments come from the trainer.
        parser: after parsing; it knows the command line and where each argument came from.
    """
    folder = Path(str(trainer.args.output_dir))
    record = record_run(trainer, trained, settings, parser.origins, parser.arguments)
    evaluations = record_evaluations(trainer)

    def write() -> dict[str, Any]:
        assert outcome is not None
        config = trainer.model.config
        encoder = config.antigen_encoder or {}
        model = {
            "architecture": config.architecture,
            "antigen_encoder": encoder.get("name_or_path"),
            "encoder_training": encoder.get("training"),
        }
        results = {
            **record,
            "task": "generation",
            **{name: value for name, value in outcome.facts.items() if name != "generation"},
            "model": {**record["model"], **model},
            **evaluations,
            "generation": outcome.facts["generation"],
            "data": with_absolute_path(data.report, "source"),
        }
        write_json(folder / "all_results.json", results)
        write_gates(folder / GATES_NAME, {outcome.facts["stage"]: outcome.gates})
        with plots_if_possible():
            plot_loss(trainer.state.log_history, folder / "loss.png")
        return results

    return do_on_main(trainer.args, write)


def save_all_gates(args: Any, stages: Sequence[Mapping[str, Any]]) -> None:
    """Writes `gates.json` of `--stage auto` into its folder: the gates of all stages so far. All processes call it.

    Args:
        args: of `--stage auto`, whose folder it goes to.
        stages: what the `all_results.json` of each holds.
    """
    gates = {results["stage"]: [Gate(**gate) for gate in results["gates"]] for results in stages}
    do_on_main(args, lambda: write_gates(Path(str(args.output_dir)) / GATES_NAME, gates))


def check_passed(results: Mapping[str, Any]) -> None:
    """Raises GatesFailed where a stage did not pass; `results` as `save_results` returns them."""
    if results["gates_passed"]:
        return
    failed = [f"{gate['name']}: {gate['reason']}" for gate in results["gates"] if gate["passed"] is False]
    listed = "; ".join(failed) or "no gate applies to this run, so none passed"
    raise GatesFailed(
        f"Stage {results['stage']} did not pass its gates ({listed}). Model and report are whole, in "
        f"{results['settings']['output_dir']}; {GATES_NAME} there has each gate. Train longer or on other data, or "
        "give a threshold of your own (--gate_NAME)."
    )
