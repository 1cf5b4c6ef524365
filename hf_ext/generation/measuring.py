"""What is measured of a generator: a few samples at each evaluation; of a trained one also what it memorised and reads.

All that is written is judged by `judging`; here is what it is asked for.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback

from ..data.splits import draw_rows
from ..errors import DataError
from ..evaluation._arrays import FloatArray
from ..files import write_text
from ..optional import import_problem
from .arguments import GeneratorArguments
from .building import Inputs
from .judging.conditions import ConditionEffect, judge_condition, shuffle_affinities, shuffle_antigens
from .judging.discriminator import Discriminator
from .judging.judgement import Judgement, Judges, judge_generated
from .judging.numbering import Numberer
from .judging.rows import AntibodyRows, Sampling
from .judging.validity import Humanness, find_problems
from .preparing import PairData
from .sampling import sample_pairs

EPOCH_SAMPLES = "epoch_samples.jsonl"
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
    """One antibody for each of `antigens`, which may repeat: then each is another draw.

    Args:
        affinities: (n,) asked for; None: unknown.
        decoding: settings of `sample_pairs`, whose errors are those here.
    """
    given: dict[str, Any] = {"affinity": affinities, "encoder_states": inputs.states, "show_progress": False}
    written = sample_pairs(model, inputs.antigen_tokenizer, antigens, seed=seed, **given, **decoding)
    pairs = [one.pair for (one,) in written]
    return AntibodyRows.of(pairs, antigens, ["; ".join(pair.malformed) or None for pair in pairs])


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

    def __init__(self, folder: str, args: GeneratorArguments, data: PairData, inputs: Inputs, seed: int):
        self._path = Path(folder) / EPOCH_SAMPLES
        self._known, self._needs_light = set(data.antibodies("train").pairs), data.needs_light
        distinct = list(dict.fromkeys(data.antibodies("validation").antigens))
        self._antigens = [distinct[i % len(distinct)] for i in range(args.num_epoch_samples)]
        self._inputs, self._decoding, self._seed = inputs, args.decoding, seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A continued run drops what was written after the step that it continues from, a new one everything."""
        if state.is_world_process_zero and self._path.is_file():
            self._write(state.global_step + 1 if state.global_step else 0)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by Trainer after each evaluation."""
        if not (self._antigens and state.is_world_process_zero):
            return
        rows = sample_rows(model, self._inputs, self._antigens, self._seed, **self._decoding)
        numbers = {
            "sampled_valid": find_problems(rows, None, self._needs_light).count(None),
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
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.is_file() else []
        write_text(self._path, "".join([one for one in lines if json.loads(one)["step"] < step] + [line]))


def find_judges(args: GeneratorArguments) -> Judges:
    """The libraries that are installed, or were asked for, and the discriminator; before anything is trained.

    Raises:
        MissingDependencyError: of what was asked for.
        ArgumentError: see `Discriminator.from_pretrained`.
    """
    wants_humanness = args.humanness == "on" or (args.humanness == "auto" and import_problem("promb") is None)
    return Judges(
        numberer=Numberer.of(args.numbering),
        humanness=Humanness() if wants_humanness else None,
        discriminator=Discriminator.from_pretrained(args.discriminator) if args.discriminator else None,
        threshold=args.affinity_threshold,
    )


def score_rows(trainer: Any, tokens: Dataset) -> FloatArray:
    """(n, 3) of rows in evaluation mode: summed loss in nats, right tokens, tokens. All processes call it."""
    return np.asarray(trainer.predict(tokens).predictions, np.float64)


def measure_training_loss(trainer: Any, data: PairData, inputs: Inputs) -> float:
    """Mean loss per token of training rows in evaluation mode, nats; of a seeded `MAX_MEASURED` where there are more.

    All processes call it.
    """
    rows, affinities = data.take("train", trainer.args.seed, MAX_MEASURED)
    sums = score_rows(trainer, inputs.tokenize(rows, affinities))
    return float(sums[:, 0].sum() / sums[:, 2].sum())


def measure_reproduced(model: Any, data: PairData, inputs: Inputs, num: int, seed: int) -> dict[str, Any]:
    """How many training antigens greedy decoding writes a training antibody of their own for, to the residue.

    Each antigen is asked for once, with the affinity of one of its rows; `num` antigens at most, a seeded choice.
    Of antigens with several antibodies any of these counts.
    """
    rows, affinities = data.antibodies("train"), data.affinities("train")
    row_of = {antigen: row for row, antigen in reversed([*enumerate(rows.antigens)])}  # the first
    distinct = list(dict.fromkeys(rows.antigens))
    antigens = [distinct[i] for i in draw_rows(len(distinct), seed, num)]
    asked = None if affinities is None else [affinities[row_of[antigen]] for antigen in antigens]
    written = sample_rows(model, inputs, antigens, seed, asked, greedy=True)
    known = set(zip(rows.antigens, rows.pairs))
    columns = zip(antigens, written.pairs, written.malformed)
    right = sum(not problem and (antigen, pair) in known for antigen, pair, problem in columns)
    distinct_outputs = len(set(written.pairs))
    return {"share": right / len(antigens), "num_antigens": len(antigens), "num_distinct_outputs": distinct_outputs}


def measure_effects(trainer: Any, data: PairData, inputs: Inputs) -> list[ConditionEffect]:
    """What the true antigen, and the true pKd, save of the loss of test rows; see `judge_condition`.

    All processes call it. An effect that cannot be measured is left out, and the log says why.
    """
    seed = trainer.args.seed
    rows, affinities = data.take("test", seed, MAX_MEASURED)
    true = score_rows(trainer, inputs.tokenize(rows, affinities))
    sampling = Sampling(data.find_units(rows.antigens), seed=seed)
    found = []

    groups = data.find_groups()
    clusters = None if groups is None else [groups[1][antigen] for antigen in rows.antigens]
    for condition in ("antigen", "pKd") if affinities is not None else ("antigen",):
        try:
            if condition == "antigen":
                other = tuple(shuffle_antigens(rows.antigens, seed, clusters))
                mixed = inputs.tokenize(replace(rows, antigens=other), affinities)
            else:
                mixed = inputs.tokenize(rows, shuffle_affinities(affinities, seed))
            shuffled = score_rows(trainer, mixed)
            found.append(judge_condition(condition, true[:, 2], true[:, 0], shuffled[:, 0], sampling))
        except DataError as error:
            logger.warning("Whether the %s is read was not measured: %s", condition, error)
    return found


def judge(
    model: Any,
    data: PairData,
    inputs: Inputs,
    args: GeneratorArguments,
    judges: Judges,
    effects: Sequence[ConditionEffect],
    seed: int,
) -> tuple[Judgement, AntibodyRows, list[float] | None]:
    """Writes antibodies for test antigens and judges them; also returns them, and the pKd that each was asked for.

    Of more test antigens than `num_judged`, a seeded choice; of fewer, as many antibodies for each as make that many.
    Asked for are pKd drawn from those of training.
    """
    test = data.antibodies("test")
    distinct = list(dict.fromkeys(test.antigens))
    distinct = [distinct[i] for i in draw_rows(len(distinct), seed, args.num_judged)]
    antigens = [antigen for antigen in distinct for _ in range(math.ceil(args.num_judged / len(distinct)))]
    asked = None
    if (known := data.affinities("train")) is not None:
        asked = np.random.default_rng(seed).choice(known, len(antigens)).tolist()
    written = sample_rows(model, inputs, antigens, seed, asked, **args.decoding)
    judgement = judge_generated(
        written,
        data.antibodies("train"),
        test,
        Sampling(data.find_units(antigens), seed=seed),
        judges=judges,
        effects=effects,
        asked=asked,
        needs_light=data.needs_light,
    )
    return judgement, written, asked
