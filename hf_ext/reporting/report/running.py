"""How the run ran: the plan's decisions, what it cost, and how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import units
from .blocks import Block, Code, Command, Fold, Paragraph, Section, Table
from .run_files import RunFiles
from .tasks import TaskReport
from .values import as_dict, hide_folders, setting

_KINDS = {"I": "identical", "N": "numerics", "L": "learning"}


def plan_section(run: RunFiles) -> Section:
    """Every speed-up: applied, skipped or refused, and why."""
    decisions = [as_dict(decision) for decision in run.plan.get("decisions") or []]
    if not decisions:
        return Section("plan", "Plan", [Paragraph("Not recorded: the run left no plan.json.")])
    asked: list[list[object]] = []
    off: list[list[object]] = []
    for decision in decisions:
        row = [
            Code(str(decision.get("name"))),
            decision.get("status"),
            _KINDS.get(str(decision.get("kind")), decision.get("kind")),
            str(decision.get("reason") or "") + _evidence(as_dict(decision.get("evidence"))),
        ]
        (off if decision.get("status") == "off" else asked).append(row)
    hardware = as_dict(run.plan.get("hardware"))
    preset = f", preset {run.plan['preset']}" if run.plan.get("preset") else ""
    text = (
        f"Decided before the first step for {hardware.get('name') or 'this machine'}{preset}. Identical: the same "
        "mathematics; numerics: other rounding; learning: changes what is learned."
    )
    headers = ["speed-up", "status", "class", "why, and what was measured"]
    blocks: list[Block] = [Paragraph(text), Table(headers, asked)]
    if off:
        blocks.append(Fold(f"{len(off)} not asked for", [Table(headers, off)]))
    return Section("plan", "Plan", blocks)


def _evidence(evidence: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in evidence.items() if not isinstance(value, (dict, list))}
    return "".join(f"; {name.replace('_', ' ')} {units.number(value)}" for name, value in plain.items())


def cost_section(task: TaskReport) -> Section:
    """Time, throughput, memory, money."""
    run = task.run
    train, costs = as_dict(run.results.get("train")), as_dict(run.results.get("costs"))
    sessions = costs.get("num_sessions")
    rows: list[list[object]] = [
        ["whole run, wall clock", units.seconds(costs.get("wall_s"))],
        ["training", units.seconds(costs.get("train_s", train.get("train_runtime")))],
        ["of it warm-up, not in the rates", units.seconds(train.get("train_warmup_seconds"))],
        ["sessions", units.number(sessions)],
        *_rates(task, " of the last session" if units.is_finite(sessions) and sessions > 1 else ""),
        *_padding(task),
        ["waiting for data", units.share(train.get("train_data_wait_share"))],
        ["model FLOPs utilization", units.share(train.get("train_mfu"))],
        [f"peak memory{_of(costs)}", units.gib(costs.get("peak_memory_gib", train.get("train_peak_memory_gib")))],
        ["price", _price(costs)],
        ["money", units.dollars(costs.get("dollars"))],
    ]
    padding = "Padding does not count as residues. " if task.pads else ""
    note = f"{padding}Rates leave evaluation, saving and logging out."
    blocks = [Table(["", ""], rows), Paragraph(note), *_profile_blocks(task.run)]
    return Section("cost", "Time, memory, money", blocks)


def _profile_blocks(run: RunFiles) -> list[Block]:
    """The most costly operations, where the run was profiled."""
    profile = as_dict(run.results.get("profile"))
    found = [as_dict(operation) for operation in profile.get("operations") or []]
    if not found:
        return []
    first, last = profile["steps"]
    times = profile.get("seconds") or []
    on_device = any(operation.get("self_device_ms") for operation in found)
    kind = "self_device_ms" if on_device else "self_cpu_ms"
    num_steps = max(1, last - first + 1)
    rows = [
        [
            Code(str(o.get("name"))),
            units.number(o["calls"] / num_steps),
            f"{o[kind] / num_steps:.3f}",
            units.share(o["share"]),
        ]
        for o in found
    ]
    where = "the device" if on_device else "the CPU"
    step = f" A step took {units.seconds(sum(times) / len(times))} under the profiler." if times else ""
    trace = f" {profile['trace']} opens in ui.perfetto.dev." if profile.get("trace") else ""
    text = (
        f"The most costly operations of steps {first} to {last}, profiled on the main process: time on {where} of "
        f"their own, without what they call.{step} No rate above includes these steps.{trace}"
    )
    return [Paragraph(text), Table(["operation", "calls per step", "ms per step", "share"], rows)]


def _rates(task: TaskReport, last: str) -> list[list[object]]:
    train = as_dict(task.run.results.get("train"))
    counted = [unit for unit in ("residues", "tokens", "sequences") if f"train_{unit}_per_s" in train] or ["residues"]
    rates = [units.rate(train.get(f"train_{unit}_per_s"), task.unit_word(unit)) for unit in counted]
    return [[f"throughput{last}", rate] for rate in rates]


def _padding(task: TaskReport) -> list[list[object]]:
    share = as_dict(task.run.results.get("train")).get("train_padding_share")
    return [["padding", units.share(share)]] if task.pads else []


def _of(costs: Mapping[str, Any]) -> str:
    return f" of the {costs['memory_of']}" if costs.get("memory_of") else ""


def _price(costs: Mapping[str, Any]) -> str:
    price = costs.get("dollars_per_hour")
    return "not given (--dollars_per_hour)" if price is None else f"{units.dollars(price)} per hour"


def reproduce_section(run: RunFiles) -> Section:
    """Command, seed, arguments, versions, machine."""
    results = run.results
    blocks: list[Block] = []
    command = results.get("command")
    if command:
        text = "Absolute paths are shortened to their last part; all_results.json of the run has them whole."
        blocks += [Command(hide_folders(str(command))), Paragraph(text)]
    seed, commit = results.get("seed", run.settings.get("seed")), results.get("commit")
    blocks.append(Table(["", ""], [["seed", _or_not(seed)], ["commit", _or_not(commit)]]))
    origins = as_dict(results.get("settings_from"))
    chosen = [[Code(name), Code(setting(run.settings.get(name))), source] for name, source in origins.items()]
    if chosen:
        headers = ["argument", "value", "from"]
        blocks.append(Fold(f"{len(chosen)} arguments that are not the default", [Table(headers, chosen)]))
    if run.settings:
        rows = [[Code(name), Code(setting(value))] for name, value in run.settings.items()]
        blocks.append(Fold(f"All {len(rows)} arguments", [Table(["argument", "value"], rows)]))
    return Section("reproduce", "How to reproduce it", [*blocks, *_environment(run)])


def _environment(run: RunFiles) -> list[Block]:
    environment = as_dict(run.results.get("environment"))
    versions = as_dict(environment.get("versions")) or as_dict(run.plan.get("versions"))
    hardware = as_dict(run.plan.get("hardware"))
    machine: dict[str, Any] = {"hardware": hardware.get("name"), "memory GiB": hardware.get("memory_gib")}
    machine |= {name.replace("_", " "): value for name, value in environment.items() if name != "versions"}
    facts = [[name, units.number(value)] for name, value in machine.items() if value is not None]
    packages = [[Code(name), version or "not installed"] for name, version in versions.items()]
    blocks: list[Block] = [Table(["", ""], facts)] if facts else []
    return [*blocks, *([Table(["package", "version"], packages)] if packages else [])]


def _or_not(value: Any) -> str:
    return "not recorded" if value is None else str(value)
