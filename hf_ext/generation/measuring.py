"""What is measured of a trained generator: what it memorised, whether it reads its antigen, what it writes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from ..data.splits import draw_rows
from ..errors import DataError
from ..evaluation._arrays import FloatArray
from ..optional import import_problem
from .arguments import GeneratorArguments
from .building import Inputs
from .judging.conditions import ConditionEffect, judge_condition, shuffle_affinities, shuffle_antigens
from .judging.discriminator import Discriminator
from .judging.judgement import Judgement, Judges, judge_generated
from .judging.numbering import Numberer
from .judging.rows import AntibodyRows, Sampling
from .judging.validity import Humanness
from .preparing import PairData, find_units
from .sampling import sample_pairs

MAX_MEASURED = 2000  # rows of a split whose losses are computed; a seeded sample of more

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """How tokens are chosen; see `sample_pairs`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False

    @classmethod
    def of(cls, args: GeneratorArguments) -> Decoded:
        """As the arguments say."""
        return cls(args.temperature, args.top_k, args.top_p)


def sample_rows(
    model: Any,
    inputs: Inputs,
    antigens: Sequence[str],
    decoded: Decoded,
    seed: int,
    affinities: Sequence[float] | None = None,
) -> AntibodyRows:
    """One antibody for each of `antigens`, which may repeat: then each is another draw. See `sample_pairs` for errors.

    Args:
        affinities: (n,) asked for; None: unknown.
    """
    written = sample_pairs(
        model, inputs.antigen_tokenizer, antigens, **vars(decoded), affinity=affinities, seed=seed,
        encoder_states=inputs.states, show_progress=False,
    )  # fmt: skip
    pairs = [one.pair for (one,) in written]
    return AntibodyRows.of(pairs, antigens, ["; ".join(pair.malformed) or None for pair in pairs])


def find_judges(args: GeneratorArguments, device: str | None = None) -> Judges:
    """The libraries that are installed, or were asked for, and the discriminator; before anything is trained.

    Raises:
        MissingDependencyError: of what was asked for.
        ArgumentError: see `Discriminator.from_pretrained`.
    """
    discriminator = None
    if args.discriminator:
        discriminator = Discriminator.from_pretrained(args.discriminator, device=device)
    wants_humanness = args.humanness == "on" or (args.humanness == "auto" and import_problem("promb") is None)
    return Judges(
        numberer=Numberer.of(args.numbering),
        humanness=Humanness() if wants_humanness else None,
        discriminator=discriminator,
        threshold=args.affinity_threshold,
    )


def score_rows(trainer: Any, tokens: Dataset) -> FloatArray:
    """(n, 3) of rows in evaluation mode: summed loss in nats, right tokens, tokens. All processes call it."""
    return np.asarray(trainer.predict(tokens).predictions, np.float64)


def measure_training_loss(trainer: Any, data: PairData, inputs: Inputs) -> float:
    """Mean loss per token of training rows in evaluation mode, nats; of a seeded `MAX_MEASURED` where there are more.

    All processes call it.
    """
    rows = draw_rows(len(data.splits["train"]), trainer.args.seed, MAX_MEASURED).tolist()
    sums = score_rows(trainer, _tokenize(data, inputs, "train", rows))
    return float(sums[:, 0].sum() / sums[:, 2].sum())


def measure_reproduced(model: Any, data: PairData, inputs: Inputs, num: int, seed: int) -> dict[str, Any]:
    """How many training antigens greedy decoding writes a training antibody of their own for, to the residue.

    Each antigen is asked for once, with the affinity of one of its rows; `num` antigens at most, a seeded choice.
    Of antigens with several antibodies any of these counts.
    """
    rows = data.antibodies("train")
    affinities = data.affinities("train")
    known: dict[str, set[tuple[str, str | None]]] = {}
    row_of: dict[str, int] = {}
    for row, (antigen, pair) in enumerate(zip(rows.antigens, rows.pairs)):
        known.setdefault(antigen, set()).add(pair)
        row_of.setdefault(antigen, row)
    antigens = [list(row_of)[i] for i in draw_rows(len(row_of), seed, num)]
    asked = None if affinities is None else [affinities[row_of[antigen]] for antigen in antigens]
    written = sample_rows(model, inputs, antigens, Decoded(greedy=True), seed, asked)
    right = sum(
        not problem and pair in known[antigen]
        for antigen, pair, problem in zip(antigens, written.pairs, written.malformed)
    )
    distinct = len(set(written.pairs))
    return {"share": right / len(antigens), "num_antigens": len(antigens), "num_distinct_outputs": distinct}


def measure_effects(trainer: Any, data: PairData, inputs: Inputs) -> list[ConditionEffect]:
    """What the true antigen, and the true pKd, save of the loss of test rows; see `judge_condition`.

    All processes call it. An effect that cannot be measured is left out, and the log says why.
    """
    seed = trainer.args.seed
    chosen = draw_rows(len(data.splits["test"]), seed, MAX_MEASURED).tolist()
    rows, affinities = data.antibodies("test").select(chosen), _take(data.affinities("test"), chosen)
    true = score_rows(trainer, inputs.tokenize(rows, affinities))
    sampling = Sampling(find_units(data, rows.antigens), seed=seed)
    found = []
    try:
        groups = data.find_groups()
        clusters = None if groups is None else [groups[1][antigen] for antigen in rows.antigens]
        other = shuffle_antigens(rows.antigens, seed, clusters)
        moved = AntibodyRows(rows.heavy, rows.light, tuple(other), rows.malformed)
        shuffled = score_rows(trainer, inputs.tokenize(moved, affinities))
        found.append(judge_condition("antigen", true[:, 2], true[:, 0], shuffled[:, 0], sampling))
    except DataError as error:
        logger.warning("Whether the antigen is read was not measured: %s", error)
    if affinities is not None:
        try:
            mixed = shuffle_affinities(affinities, seed)
            shuffled = score_rows(trainer, inputs.tokenize(rows, mixed))
            found.append(judge_condition("pKd", true[:, 2], true[:, 0], shuffled[:, 0], sampling))
        except DataError as error:
            logger.warning("Whether pKd is read was not measured: %s", error)
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
    written = sample_rows(model, inputs, antigens, Decoded.of(args), seed, asked)
    judgement = judge_generated(
        written,
        data.antibodies("train"),
        test,
        Sampling(find_units(data, antigens), seed=seed),
        judges=judges,
        effects=effects,
        asked=asked,
        needs_light=data.needs_light,
    )
    return judgement, written, asked


def _tokenize(data: PairData, inputs: Inputs, split: str, rows: Sequence[int]) -> Dataset:
    return inputs.tokenize(data.antibodies(split).select(rows), _take(data.affinities(split), rows))


def _take(values: Sequence[float] | None, rows: Sequence[int]) -> list[float] | None:
    return None if values is None else [values[row] for row in rows]
