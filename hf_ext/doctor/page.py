"""The findings on one screen, which begins with the answer."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import get_args

import torch

from ..checkpoints import GB
from ..memory import MemoryReport, format_memory
from ..models import Training, choose_encoder
from ..speedups import best_precision
from ..tasks import Finding, Span
from ..text import format_table, units
from .estimates import row_flops
from .findings import would_run
from .gather import Facts

WIDTH = 100
TRAININGS: tuple[Training, ...] = get_args(Training)
PRECISIONS = {  # that `max_speed` trains in
    "bf16": "native bf16",
    "fp16": "fp16 with loss scaling: no native bf16",
    "fp32": "float32: neither bf16 nor fp16 is native",
}


def format_page(facts: Facts, findings: list[Finding]) -> str:
    """Formats a page of 100 columns: whether it would run, time, memory, disk; what is off; what that rests on."""
    sections = [_answer(facts, findings), _off(findings), _data(facts), _stages(facts), _basis(facts)]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def wrap(text: str, first: str = "  ", rest: str = "    ") -> list[str]:
    """Wraps `text` in lines of the page's width."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _answer(facts: Facts, findings: list[Finding]) -> Iterator[str]:
    dry_run = facts.dry_run
    main = facts.main
    name = facts.machine.hardware.name
    if would_run(findings):
        yield f"This command would run on {name}."
    else:
        yield f"This command would not run to its end on {name}: see STOPS."
    demo = "the demo, none of your rows (--dataset_name FILE): " if dry_run.is_demo else ""
    yield from _line("data", demo + dry_run.subject)
    yield from _line("time", _time(facts))
    if facts.args.dollars_per_hour:
        yield from _line("cost", _cost(facts, facts.total_seconds))
    if main is None:
        return
    peak = _peak(facts)
    if isinstance(main.memory, MemoryReport):
        room = main.memory.room
        counted = "" if room is None else f" of the {units.memory(room)} that can be counted on"
        yield from _line("memory", f"{units.memory(peak)}{counted}")
    if facts.host_bytes is not None:
        above = peak if facts.machine.hardware.kind == "cpu" else 0
        above += min(above, main.plan.count_costs(main.stage.args).kept_bytes)
        held = f"rows, libraries and baselines{' and the above' if above else ''}"
        size = units.memory(facts.host_bytes + above)
        yield from _line("host memory", f"about {size} for {held}, of {facts.machine.free_memory_gib:.1f} GiB free")
    needed = {name: units.storage(num_bytes) for name, num_bytes in facts.needed_bytes.items() if num_bytes}
    parts = {"output_dir": "checkpoints and model", "cache_dir": "embeddings", "hub_cache": "downloads"}
    free = facts.machine.free_bytes["output_dir"] / GB
    listed = ", ".join(f"{parts[name]} {size}" for name, size in needed.items())
    yield from _line("disk", f"{listed} at most; {free:.1f} GB free in {facts.machine.output_dir}")
    first = "--dataset_name, for rows of yours" if dry_run.is_demo else "nothing"
    if findings:
        first = findings[0].remedy
    yield from _line("change first", first)


def _line(what: str, text: str) -> list[str]:
    return wrap(f"{what + ':':<14}{text}", rest=" " * 16)


def _time(facts: Facts) -> str:
    total = facts.total_seconds
    if total is None:
        reasons = [each.times.basis for each in facts.asked if each.times.total is None]
        return f"not known: {reasons[0] if reasons else 'data or model could not be read'}"
    lines = [f"{what}: {units.seconds_span(span)}" for each in facts.asked for what, span in each.times.lines]
    detail = f" ({'; '.join(lines)})" if len(facts.asked) == 1 else ""
    return f"{units.seconds_span(total)}{detail}"


def _cost(facts: Facts, span: Span | None) -> str:
    """Formats what so many seconds cost, from the least to the most; "-" where time or price is not known."""
    prices = facts.args.dollars_per_hour
    if not (span and prices):
        return units.MISSING
    return f"${span[0] / 3600 * prices[0]:,.2f} to ${span[1] / 3600 * prices[0]:,.2f}"


def format_machines(looked: Sequence[tuple[Facts, list[Finding]]]) -> str:
    """Formats a table of several machines, a row for each and for each of several stages; and what is off on each."""
    rows = []
    off: list[str] = []
    for facts, findings in looked:
        name = facts.machine.hardware.name
        peak = units.memory(_peak(facts)) if _peak(facts) else units.MISSING
        spans = {each.stage.title: each.times.total for each in facts.stages} | {"": facts.total_seconds}
        for title, span in spans.items():
            runs = would_run(findings)
            rows.append([f"{name} {title}", runs, peak, _span(span), _cost(facts, span)])
        off += [f"\n{name}", *_off(findings)] if findings else []
    return "\n".join([format_table(rows, ["machine", "runs", "memory", "time", "cost"]), *off])


def _span(span: Span | None) -> str:
    return units.seconds_span(span) if span else units.MISSING


def _peak(facts: Facts) -> int:
    """Returns the most that a step takes; 0 where that is not known."""
    memory = facts.main and facts.main.memory
    return memory.forecast.peak if isinstance(memory, MemoryReport) else 0


def _off(findings: list[Finding]) -> Iterator[str]:
    if findings:
        yield "What is off, and the remedy:"
    for finding in findings:
        mark = "STOPS" if finding.level == "stops" else "warns"
        yield from wrap(f"{mark} {finding.name}: {finding.text}")
        yield from wrap(f"-> {finding.remedy}", "    ", "       ")


def _data(facts: Facts) -> Iterator[str]:
    """Yields all that the run would say of its rows: how many there are, and what of them may be wrong."""
    dry_run = facts.dry_run
    for line in dry_run.describe().splitlines() if dry_run.describe else ():
        yield from wrap(line.strip(), line[: -len(line.lstrip())])
    if dry_run.measure:
        yield from wrap(dry_run.measure, "")


def _stages(facts: Facts) -> Iterator[str]:
    """Yields a row for each of several stages, also those that the command does not run."""
    if len(facts.stages) < 2:
        return
    rows = []
    for each in facts.stages:
        total = each.times.total
        flops = 0.0  # of training with its evaluations; 0 where its length is not known
        if each.schedule:
            flops = sum(sum(row_flops(part, each.stage, each.schedule)) for part in each.stage.parts)
        num_trained = sum(one.numel() for one in each.stage.model.parameters() if one.requires_grad)
        rows.append(
            [
                each.stage.title,
                f"{num_trained / 1e6:.1f} M",
                each.stage.num_rows["train"],
                each.schedule.updates if each.schedule else units.MISSING,
                f"{flops / 1e15:.3g}",
                _span(total),
                _cost(facts, total),
            ]
        )
    yield format_table(rows, ["stage", "trained", "rows", "steps", "PFLOP", "time, at most", "cost"])
    yield from wrap(
        "At most: stages 2 and 3 end early where the validation loss stops falling. Evaluations are included, and in "
        "the last row starting and reading; writing and judging samples is not."
    )


def _basis(facts: Facts) -> Iterator[str]:
    machine = facts.machine
    hardware = machine.hardware
    main = facts.main
    yield "What this rests on; no measurement of this run:"
    size = "memory not known" if hardware.memory_gib is None else f"{hardware.memory_gib:g} GiB"
    described = ", described; cores, memory and disks are this machine's" if machine.is_described else ""
    yield from wrap(
        f"machine: {hardware.name}, {size}{described}; trains in {PRECISIONS[best_precision(hardware)]}; "
        f"{machine.cpu_cores} cores, {machine.free_memory_gib:.1f} of {machine.memory_gib:.1f} GiB free; "
        f"torch {torch.__version__}"
    )
    if main is not None:
        plan = main.plan
        applied = [decision.name for decision in plan.decisions if decision.status == "applied"]
        preset = f", preset {plan.preset}" if plan.preset else ""
        yield from wrap(f"plan{preset}: {', '.join(applied) or 'nothing'}")
        if main.times.lines:
            bases = dict.fromkeys(each.times.basis for each in facts.asked)
            yield from wrap(f"time: {'; '.join(bases)}")
        if isinstance(main.memory, MemoryReport):
            for line in format_memory(main.memory):
                yield from wrap(line)
        else:
            yield from wrap(f"memory: {main.memory}")
        if main.encoding_bytes:
            weights = units.memory(main.encoding_bytes)
            yield from wrap(f"memory while encoding: weights {weights}, and a batch that halves until it fits")
    for note in facts.dry_run.notes:
        yield from wrap(f"note: {note}")
    if facts.dry_run.encoder_flag:
        encoders = {training: choose_encoder(hardware, training).name for training in TRAININGS}
        ways = {name: [how for how in TRAININGS if encoders[how] == name] for name in encoders.values()}
        named = "; ".join(f"{facts.dry_run.encoder_flag} {name} ({', '.join(how)})" for name, how in ways.items())
        yield from wrap(f"best encoder that fits {hardware.name} and is fast enough there: {named}")
