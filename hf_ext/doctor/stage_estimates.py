"""What each stage of a generator computes, and how long it would take here and on other cards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ..generation.stages import STAGES
from ..hardware import Hardware
from ..models.generation.configuration import GeneratorConfig
from ..plan import Plan
from .estimates import STEP_SECONDS, Rate, Schedule, count_flops, published_rate
from .pair_lengths import PairLengths, count_pair_flops
from .work import Encoder, Tokens

Span = tuple[float, float]
# One time step of one LSTM layer on a GPU, forward and backward: kernels that wait for each other. Assumed.
LSTM_STEP_SECONDS = (1e-5, 5e-5)


@dataclass(frozen=True)
class StageWork:
    """A stage: its model and rows, and what they come to.

    Attributes:
        number, goal, size: of the stage.
        config: of the generator.
        num_parameters: of what trains.
        num_rows: of training, after filter and limit.
        batch_rows: of a micro-batch; passes: of micro-batches; steps: of the optimizer.
        flops: of training with its evaluations, of all epochs.
        encoder: a frozen encoder and the distinct antigens that it reads once; None where there is none.
        time_steps: of LSTM layers, one after the other, from rows of middle length to the longest; 0 of others.
    """

    number: int
    goal: str
    size: str
    config: GeneratorConfig
    num_parameters: int
    num_rows: int
    batch_rows: int
    steps: int
    passes: int
    flops: float
    encoder: Encoder | None = None
    time_steps: Span = (0.0, 0.0)


@dataclass(frozen=True)
class StageTime:
    """Seconds on one machine, and what they rest on; None where nothing is known, and `basis` says why."""

    machine: str
    dtype: str
    seconds: Span | None
    basis: str


@dataclass(frozen=True)
class StageEstimate:
    """A stage with its times: `here` first, on the machine that was asked about; then on `cards`, by their names."""

    work: StageWork
    here: StageTime
    cards: dict[str, StageTime] = field(default_factory=dict)


def sum_work(
    number: int,
    size: str,
    model: Any,
    rows: dict[str, PairLengths],
    schedule: Schedule,
    args: Any,
    encoder: Encoder | None = None,
) -> StageWork:
    """The work of a stage.

    Args:
        model: `AntibodyGenerator`, on the meta device.
        rows: "train" and "validation" of the stage.
        schedule, args: of the stage.
        encoder: see `StageWork`.
    """
    train, validation = rows["train"], rows["validation"]
    flops = schedule.epochs * count_pair_flops(model, train, schedule.batch_rows, is_training=True)
    if len(validation):
        evaluated = schedule.evaluations * schedule.evaluated_share
        flops += evaluated * count_pair_flops(model, validation, args.per_device_eval_batch_size, is_training=False)
    return StageWork(
        number=number,
        goal=STAGES[number].goal,
        size=size,
        config=model.config,
        num_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        num_rows=len(train),
        batch_rows=round(schedule.batch_rows),
        steps=math.ceil(schedule.steps / args.gradient_accumulation_steps),
        passes=schedule.steps,
        flops=flops,
        encoder=encoder,
        time_steps=_time_steps(model.config, train, schedule.steps),
    )


def _time_steps(config: GeneratorConfig, rows: PairLengths, passes: int) -> Span:
    if config.architecture != "lstm":
        return 0.0, 0.0
    read = rows.antigen_tokens[rows.antigen_index]
    # Both directions of the encoder's layers, one after the other.
    layers = 2 * config.num_encoder_layers, config.num_decoder_layers
    least = layers[0] * float(read.mean()) + layers[1] * float(rows.pair_tokens.mean())
    most = layers[0] * float(read.max()) + layers[1] * float(rows.pair_tokens.max())
    return passes * least, passes * most


def estimate_stage(work: StageWork, rate: Rate, encoder_rate: Rate | None, is_gpu: bool, padding: float = 0.0) -> Span:
    """Seconds, from the least to the most: encoding antigens once, training with its evaluations.

    What is written and judged, at evaluations and at the end, is left out.

    Args:
        rate, encoder_rate: of the generator, and of its frozen encoder.
        is_gpu: an LSTM's time steps wait for each other there.
        padding: share of tokens that are none, where `rate` counts those that are.
    """
    per_time_step = LSTM_STEP_SECONDS if is_gpu else (0.0, 0.0)
    spans = [
        work.flops / (1 - padding) / rates + work.passes * step + work.time_steps[i] * per_time_step[i]
        for i, (rates, step) in enumerate(zip((rate.high, rate.low), STEP_SECONDS))
    ]
    if work.encoder is not None and encoder_rate is not None:
        once = count_flops(work.encoder.forward_flops, work.encoder.distinct)
        spans = [spans[0] + once / encoder_rate.high, spans[1] + once / encoder_rate.low]
    return spans[0], spans[1]


def estimate_card(work: StageWork, hardware: Hardware, plan: Plan) -> StageTime:
    """On a card of the hardware table, in the precision of a plan for it, or for one with the same precisions."""
    if plan["precision"].status == "refused":
        return StageTime(hardware.name, "-", None, f"{hardware.name} lacks the precision that was asked for")
    dtype = training_dtype(plan)
    rate = published_rate(hardware, dtype, work.config.d_model)
    encoder = work.encoder
    # A frozen encoder computes in float32, whatever the run's precision is.
    encoder_rate = published_rate(hardware, "fp32", encoder.width) if encoder else None
    if rate is None or (encoder is not None and encoder_rate is None):
        return StageTime(hardware.name, dtype, None, f"no {dtype} peak of {hardware.name} is published")
    packed = plan.applied("packing")
    padding = 0.0 if packed else (plan.facts.get("data", {}).get("padding_share_random") or 0.0)
    span = estimate_stage(work, rate, encoder_rate, hardware.kind != "cpu", padding)
    return StageTime(hardware.name, dtype, span, rate.basis)


def training_dtype(plan: Plan) -> str:
    """ "bf16", "fp16", "tf32" or "fp32": what the plan lets a generator train in."""
    if plan.applied("precision"):
        return str(plan["precision"].settings["mixed_precision"])
    return "tf32" if plan.applied("tf32") else "fp32"


def read_once(encoder: Encoder, rows: list[PairLengths]) -> Encoder:
    """`encoder` with the tokens of all antigens of these rows; one that stands in several of them counts in each."""
    tokens = [Tokens.of_lengths(one.antigen_tokens.tolist()) for one in rows]
    return replace(encoder, distinct=sum(tokens, Tokens()), num_distinct=sum(len(one.antigen_tokens) for one in rows))
