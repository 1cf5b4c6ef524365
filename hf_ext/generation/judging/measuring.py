"""What is measured of a generator: some samples at each evaluation; of a trained one all that its pages and gates say.

What is written is judged by `judgement`; here is what it is asked for, and what is left in the run's folder.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...data import draw_rows
from ...errors import DataError
from ...evaluation import FloatArray
from ...files import Facts, Json, write_csv, write_text
from ...processes import do_on_main
from ...tasks import check_scored, with_absolute_path
from ...text import format_table
from ..arguments import GeneratorArguments
from ..building import Inputs
from ..describing import gate_rows, score_rows
from ..preparing import PairData
from ..rows import AntibodyRows, Sampling, find_problems
from ..sampling import sample_pairs
from ..stages import GATES_NAME, check_gates, have_passed, write_gates
from .discriminator import Discriminator
from .judgement import Effect, find_gate_numbers, judge_condition, judge_generated, shuffle_affinities, shuffle_antigens

if TYPE_CHECKING:
    from ..trainer import FastTrainer

EPOCH_SAMPLES = "epoch_samples.jsonl"
GENERATED = "generated.csv"
MAX_MEASURED = 2000  # rows of a split whose losses are computed; a seeded sample of more

logger = logging.getLogger(__name__)


def sample_rows(
    model: Any,
    inputs: Inputs,
    antigens: Sequence[str],
    seed: int,
    affinities: Sequence[float] | None = None,
    **decoding: Any,
) -> AntibodyRows:
    """Samples one antibody for each of `antigens`, which may repeat: then each is another draw.

    Args:
        affinities: (n,) asked for; None: unknown.
        decoding: settings of `sample_pairs`, whose errors are those here.
    """
    given: dict[str, Any] = {"affinity": affinities, "encoder_states": inputs.states, "show_progress": False}
    written = sample_pairs(model, inputs.antigen_tokenizer, antigens, seed=seed, **given, **decoding)
    return AntibodyRows.of_pairs([one.pair for (one,) in written], antigens)


class EpochSamples(TrainerCallback):
    """Writes antibodies for some validation antigens whenever the model is evaluated, always with the same draws.

    What was measured goes to the trainer's log history (`sampled_valid`, `sampled_unique`, `sampled_memorised`, shares
    of the antibodies), and with the antibodies to `epoch_samples.jsonl`, a line per evaluation. The main process writes
    while the others wait at the next step.

    Args:
        folder: of the run.
        args: how many antibodies, one for each antigen, which repeat where there are fewer; how tokens are chosen.
        data: of the stage.
        inputs: how antigens become tokens.
        seed: of the draws.

    Cost: up to 320 passes of the decoder over one token of each.
    """

    def __init__(self, folder: Path, args: GeneratorArguments, data: PairData, inputs: Inputs, seed: int):
        self._path = folder / EPOCH_SAMPLES
        self._known = set(data.antibodies("train").pairs)
        self._needs_light = data.needs_light
        distinct = list(dict.fromkeys(data.antibodies("validation").antigens))
        self._antigens = [distinct[i % len(distinct)] for i in range(args.num_epoch_samples)]
        self._inputs = inputs
        self._decoding = args.decoding
        self._seed = seed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Drops what was written after the step that a continued run continues from; in a new run everything."""
        if state.is_world_process_zero and self._path.is_file():
            self._write(state.global_step + 1 if state.global_step else 0)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Samples some antibodies after each evaluation, and records them."""
        if not (self._antigens and state.is_world_process_zero):
            return
        rows = sample_rows(model, self._inputs, self._antigens, self._seed, **self._decoding)
        numbers = {
            "sampled_valid": find_problems(rows, self._needs_light).count(None),
            "sampled_unique": len(set(rows.pairs)),
            "sampled_memorised": sum(pair in self._known for pair in rows.pairs),
        }
        shares = {name: number / len(rows) for name, number in numbers.items()}
        entry = {"epoch": round(float(state.epoch or 0), 2), "step": state.global_step}
        state.log_history.append({**shares, **entry})
        columns = zip(rows.antigens, rows.heavy, rows.light)
        samples = [dict(zip(("antigen", "heavy", "light"), one)) for one in columns]
        # An evaluation that a stop gave up is made up for in the run that goes on, at the same step.
        self._write(state.global_step, json.dumps({**entry, **shares, "samples": samples}) + "\n")
        shown = ", ".join(f"{name.removeprefix('sampled_')} {value:.0%}" for name, value in shares.items())
        logger.info("Step %d, %d antibodies: %s; the first: %.60s", state.global_step, len(rows), shown, rows.heavy[0])

    def _write(self, step: int, line: str = "") -> None:
        """Keeps the lines of steps before `step`, and adds one."""
        kept = []
        if self._path.is_file():
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [one for one in lines if json.loads(one)["step"] < step]
        write_text(self._path, "".join([*kept, line]))


# --- of a trained model ---------------------------------------------------------------------------------------------


def measure(
    trainer: FastTrainer,
    stage: int,
    args: GeneratorArguments,
    data: PairData,
    inputs: Inputs,
    discriminator: Discriminator | None,
) -> tuple[Json, str]:
    """Measures everything that is said of the trained model, and holds it against the stage's gates.

    All processes call it; the main one writes antibodies, judges them, and leaves `generated.csv` and `gates.json`.

    Returns:
        What `all_results.json` says of it, and the same for a terminal: verdict, scores beside baselines, gates.
    """
    seed = trainer.args.seed
    model = trainer.model
    folder = Path(str(trainer.args.output_dir))
    train = _sum_losses(trainer, inputs.tokenize(*data.take("train", seed, MAX_MEASURED)))
    token_loss = float(train[:, 0].sum() / train[:, 2].sum())
    effects = measure_effects(trainer, data, inputs)

    def judge_outputs() -> tuple[Json, str]:
        reproduced = measure_reproduced(model, data, inputs, args.num_reproduced, seed)
        antigens, asked = _choose_antigens(data, args.num_judged, seed)
        written = sample_rows(model, inputs, antigens, seed, asked, **args.decoding)
        judged, by_row = judge_generated(
            written,
            data.antibodies("train"),
            data.antibodies("test"),
            Sampling(data.find_groups(antigens), seed=seed),
            discriminator=discriminator,
            threshold=args.affinity_threshold,
            effects=effects,
            asked=asked,
            needs_light=data.needs_light,
        )
        columns: Json = {
            "antigen": written.antigens,
            "heavy": written.heavy,
            "light": written.light,
            "malformed": written.malformed,
            **by_row,
        }
        if asked is not None:
            columns["asked_affinity"] = asked
        write_csv(folder / GENERATED, columns)
        numbers = {
            **find_gate_numbers(judged),
            "token_loss": token_loss,
            "reproduced": reproduced["share"],
            "num_validation_falls": count_validation_falls(trainer.state.log_history),
        }
        thresholds: Any = args.gates  # a table by now
        # Data with affinities should have a discriminator: that it is missing is no excuse.
        gates = check_gates(stage, numbers, thresholds, data.has_affinities or discriminator is not None)
        write_gates(folder / GATES_NAME, {stage: gates})
        facts = {
            "stage": stage,
            "verdict": judged.pop("verdict"),
            "gates": gates,
            "gates_passed": have_passed(gates),
            "model": {"architecture": model.config.architecture},
            "generation": {**judged, "train_token_loss": token_loss, "reproduced": reproduced},
            "data": with_absolute_path(data.report, "source"),
        }
        sets = judged["sets"]
        tables = [format_table(score_rows(sets), ["", *sets])]
        tables.append(format_table(gate_rows(gates), ["gate", "", "value", "why"]))
        text = "\n".join([facts["verdict"]["text"], *judged["notes"]])
        return facts, "\n\n".join([text, *tables])

    return do_on_main(trainer.args, judge_outputs)


def _sum_losses(trainer: FastTrainer, tokens: Dataset) -> FloatArray:
    """Sums per row in evaluation mode, (n, 3): loss in nats, right tokens, tokens. All processes call it."""
    sums = np.asarray(trainer.predict(tokens).predictions, np.float64)
    check_scored(sums, "measured")
    return sums


def _choose_antigens(data: PairData, num: int, seed: int) -> tuple[list[str], list[float] | None]:
    """Chooses the antigen of each output that is judged, and the affinity that it is asked to have.

    Of more test antigens than `num` a seeded choice; of fewer each so often that there are `num` outputs and more.
    Affinities are drawn from those of training; None where there are none.
    """
    distinct = list(dict.fromkeys(data.antibodies("test").antigens))
    distinct = [distinct[i] for i in draw_rows(len(distinct), seed, num)]
    antigens = [antigen for antigen in distinct for _ in range(math.ceil(num / len(distinct)))]
    known = data.affinities("train")
    if known is None:
        return antigens, None
    return antigens, np.random.default_rng(seed).choice(known, len(antigens)).tolist()


def measure_reproduced(model: Any, data: PairData, inputs: Inputs, num: int, seed: int) -> Json:
    """Measures of how many training antigens greedy decoding writes a training antibody of their own, to the residue.

    Each antigen is asked for once, with the affinity of one of its rows; `num` antigens at most, a seeded choice.
    Of antigens with several antibodies any of these counts.
    """
    rows = data.antibodies("train")
    affinities = data.affinities("train")
    row_of = {antigen: row for row, antigen in reversed([*enumerate(rows.antigens)])}  # the first
    distinct = list(dict.fromkeys(rows.antigens))
    antigens = [distinct[i] for i in draw_rows(len(distinct), seed, num)]
    asked = None if affinities is None else [affinities[row_of[antigen]] for antigen in antigens]
    written = sample_rows(model, inputs, antigens, seed, asked, temperature=0)
    known = set(zip(rows.antigens, rows.pairs))
    columns = zip(antigens, written.pairs, written.malformed)
    right = sum(not problem and (antigen, pair) in known for antigen, pair, problem in columns)
    return {"share": right / len(antigens), "num_antigens": len(antigens)}


def measure_effects(trainer: FastTrainer, data: PairData, inputs: Inputs) -> list[Effect]:
    """Measures what the true antigen, and the true pKd, save of the loss of test rows; see `judge_condition`.

    All processes call it. An effect that cannot be measured is left out, and the log says why.
    """
    seed = trainer.args.seed
    rows, affinities = data.take("test", seed, MAX_MEASURED)
    true = _sum_losses(trainer, inputs.tokenize(rows, affinities))
    sampling = Sampling(data.find_groups(rows.antigens), seed=seed)
    effects = []
    for condition in ("antigen", "pKd") if affinities is not None else ("antigen",):
        try:
            if condition == "antigen":
                other = tuple(shuffle_antigens(rows.antigens, seed, sampling.groups.group_of_row.tolist()))
                mixed = inputs.tokenize(replace(rows, antigens=other), affinities)
            else:
                mixed = inputs.tokenize(rows, shuffle_affinities(affinities or [], seed))
        except DataError as error:
            logger.warning("Whether the %s is read was not measured: %s", condition, error)
            continue
        shuffled = _sum_losses(trainer, mixed)
        effects.append(judge_condition(condition, true[:, 2], true[:, 0], shuffled[:, 0], sampling))
    return effects


def count_validation_falls(log_history: Sequence[Facts]) -> float | None:
    """Counts evaluations after the first with a lower validation loss than all before; None without any.

    Not how long ago the last was: early stopping waits that long in every run, and the best model is the one kept.
    """
    losses = [entry["eval_token_loss"] for entry in log_history if "eval_token_loss" in entry]
    if losses:
        return float(sum(loss < min(losses[:i]) for i, loss in enumerate(losses) if i))
    return None
