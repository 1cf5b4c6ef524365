"""The findings on one page, and the same as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from ..checkpoints.retention import GB
from ..evaluation.alarms import format_report
from ..memory.report import MemoryReport, format_memory, format_savings
from ..reporting import units
from ..reporting.tables import format_table
from ..running import summarize_data
from .encoder_choice import Choice, choose_encoders, describe_choices
from .estimates import money
from .facts import Facts, Finding
from .findings import would_run
from .machine import describe_abilities, describe_precision
from .stage_page import describe_times, format_stages, stage_values

WIDTH = 100
PROCESS_GIB = 0.6  # peak of runs with the smallest models: 0.61 to 0.68 measured


def format_page(facts: Facts, findings: list[Finding]) -> str:
    """A page of 100 columns: machine, versions, plan, data, labels, estimates, what is off, whether it would run."""
    sections = [
        _machine(facts),
        _versions(facts),
        _fold(facts.plan.table(whole=True))
        if facts.plan and facts.work
        else "Plan: it depends on a model that could not be read.",
        *_data(facts),
        _estimate(facts),
        *_encoders(facts),
        *_stages(facts),
        _off(findings),
    ]
    return "\n\n".join(sections)


def page_values(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """The page as JSON-able values."""
    total, hardware = facts.total_seconds, facts.machine.hardware
    dollars = money(total, facts.args.dollars_per_hour)
    return {
        "would_run": would_run(findings),
        "task": facts.task,
        "machine": dataclasses.asdict(facts.machine),
        "abilities": {name: {"able": able, "why": why} for name, able, why in describe_abilities(hardware)},
        "precision": describe_precision(hardware),
        "packages": [dataclasses.asdict(package) for package in facts.packages],
        "plan": facts.plan.to_dict() if facts.plan and facts.work else None,
        "data": facts.data or None,
        "labels": facts.labels or None,
        "measure": facts.measure or None,
        "estimate": {
            "basis": facts.rate_basis or facts.why_no_time,
            "seconds": {what: list(span) for what, span in facts.seconds},
            "total_seconds": list(total) if total else None,
            "dollars": list(dollars) if dollars else None,
            "device_bytes": dict(facts.memory),
            "memory": facts.forecast.to_dict() if isinstance(facts.forecast, MemoryReport) else None,
            "output_bytes": facts.output_bytes,
            "embedding_bytes": facts.embedding_bytes,
            "download_bytes": facts.download_bytes,
        },
        "encoders": [dataclasses.asdict(choice) for choice in _choices(facts)] or None,
        "stages": [stage_values(stage, facts.args.dollars_per_hour) for stage in facts.stages] or None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "notes": facts.notes,
    }


def wrap(text: str, first: str = "  ", rest: str = "    ") -> list[str]:
    """`text` in lines of the page's width."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _fold(table: str) -> str:
    """The plan's table with its last column, the reasons, folded at the page's width."""
    title, headers, rule, *rows = table.splitlines()
    column = " " * headers.index("why")
    return "\n".join([title, headers, rule[:WIDTH], *(line for row in rows for line in wrap(row, "", column))])


def _machine(facts: Facts) -> str:
    machine, hardware = facts.machine, facts.machine.hardware
    memory = "memory not known" if hardware.memory_gib is None else f"{hardware.memory_gib:g} GiB"
    peaks = ", ".join(f"{name} {value:g}" for name, value in hardware.peak_tflops.items())
    where = " (described; cores, memory and disks below are this machine's)" if machine.is_described else ""
    peak_text = f"published peaks: {peaks + ' TFLOP/s' if peaks else 'none'}"
    lines = [f"Machine: {hardware.name}, {memory}{where}"]
    lines += wrap(f"trains in {describe_precision(hardware)}; {peak_text}")
    lines += [f"  {name}: {'yes' if able else 'no'} ({why})" for name, able, why in describe_abilities(hardware)]
    shared = machine.shared_memory_bytes
    lines.append(
        f"  {machine.cpu_cores} cores, {machine.memory_gib:.1f} GiB memory ({machine.free_memory_gib:.1f} free), "
        f"/dev/shm {'absent' if shared is None else f'{shared / 2**30:.1f} GiB'}"
    )
    names = {"output_dir": "output", "cache_dir": "embeddings", "hub_cache": "downloads"}
    for name, needed in facts.needed_bytes.items():
        free = machine.free_bytes[name] / GB
        need = f"{units.storage(needed)} needed at most" if facts.work else "need not known"
        lines.append(f"  {names[name]}: {getattr(machine, name)}, {free:.1f} GB free, {need}")
    return "\n".join(lines)


def _versions(facts: Facts) -> str:
    if not facts.packages:
        return "Versions: hf_ext is not installed, so what it wants is not known."
    rows = [
        [
            package.name,
            package.installed or "-",
            package.wanted,
            package.purpose,
            package.command if package.problem else "ok",
        ]
        for package in facts.packages
    ]
    return format_table(rows, ["package", "installed", "wanted", "for", "ok, or its command"])


def _data(facts: Facts) -> list[str]:
    """What the run would say of its rows, and of what is best, before it trains, in the run's own words."""
    sections = []
    if facts.data:
        lines = summarize_data(facts.data).splitlines()
        sections.append("\n".join(folded for line in lines for folded in wrap(line.strip(), _indent(line), "    ")))
    if facts.labels:
        title, *lines = format_report(facts.labels, "Training labels")
        alarms = [line.strip() for line in lines if line.lstrip().startswith("ALARM")]
        numbers = "; ".join(" ".join(line.split()) for line in lines[: len(lines) - len(alarms)])
        folded = [part for text in (numbers, *alarms) for part in wrap(text)]
        sections.append("\n".join([f"{title}:", *folded]))
    if facts.measure:
        sections.append("\n".join(wrap(facts.measure, "")))
    return sections


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _estimate(facts: Facts) -> str:
    total = facts.total_seconds
    lines = [f"Estimate, no measurement of this run{'' if total else ': none, ' + facts.why_no_time}"]
    lines += [f"  {what}: {units.seconds_span(span)}" for what, span in facts.seconds]
    if total:
        dollars = money(total, facts.args.dollars_per_hour)
        cost = dollars and f", {dollars[0]:.2f} to {dollars[1]:.2f} dollars"
        price = cost or " (--dollars_per_hour says what that costs)"
        lines.append(f"  in all: {units.seconds_span(total)}{price}")
        lines += wrap(f"rests on {facts.rate_basis}")
    if facts.encoding_bytes:
        weights = units.memory(facts.encoding_bytes)
        lines.append(f"  memory while encoding: weights {weights}, and a batch that halves until it fits")
    if isinstance(facts.forecast, MemoryReport):
        for line in format_memory(facts.forecast):
            lines += wrap(line)
        table = format_savings(facts.forecast)
        lines += [f"    {row}" for row in table.splitlines()]
    elif facts.memory:
        parts = ", ".join(f"{what} {units.memory(num_bytes)}" for what, num_bytes in facts.memory if num_bytes)
        beside = f", and {PROCESS_GIB} GiB of Python and libraries" if facts.machine.hardware.kind == "cpu" else ""
        lines += wrap(f"memory while training: {parts}{beside}")
    return "\n".join([*lines, *(line for note in facts.notes for line in wrap(f"note: {note}"))])


def _choices(facts: Facts) -> list[Choice]:
    """Of tasks that take a pretrained encoder."""
    if facts.task not in ("affinity", "masked_lm"):
        return []
    return choose_encoders(facts.machine.hardware, facts.device_bytes)


def _encoders(facts: Facts) -> list[str]:
    choices = _choices(facts)
    if not choices:
        return []
    title = "Encoders for this device, computed: best published loss of those that fit and are fast enough"
    lines = [folded for line in describe_choices(choices) for folded in wrap(line)]
    return ["\n".join([title, *lines])]


def _stages(facts: Facts) -> list[str]:
    """Of a generator: what each stage would take, here and elsewhere."""
    if not facts.stages:
        return []
    table = format_stages(facts.stages, facts.args.dollars_per_hour)
    said = [line for text in describe_times(facts.stages) for line in wrap(text)]
    return ["\n".join(["Stages, no measurement of these runs", table, *said])]


def _off(findings: list[Finding]) -> str:
    verdict = "This command would run." if would_run(findings) else "This command would not run to its end."
    if not findings:
        return f"Nothing is off. {verdict}"
    lines = ["What is off, and the remedy:"]
    for finding in findings:
        mark = "STOPS" if finding.level == "stops" else "warns"
        lines += wrap(f"{mark} {finding.name}: {finding.text}")
        lines += wrap(f"-> {finding.remedy}", "    ", "       ")
    return "\n".join([*lines, verdict])
