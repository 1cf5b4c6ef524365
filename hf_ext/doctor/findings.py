"""What is off, and the remedy: one small check per thing, each a function of the facts alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..checkpoints import GB, check_budget, read_policy
from ..errors import ArgumentError
from ..memory import MemoryReport
from ..optional import installed_version
from ..speedups import BITSANDBYTES, asked_bits, optimizer_name
from ..tasks import Finding
from .gather import Facts, usable_memory
from .machine import COLAB_DRIVE

COLAB_HOURS = 12.0  # free sessions end then at the latest
DRIVE_MARGIN_BYTES = 10**9
TORCHAO_OPTIMIZERS = ("adamw_torch_4bit", "adamw_torch_8bit")
TRACKERS = ("wandb", "tensorboard", "mlflow", "comet_ml", "trackio")


def find_problems(facts: Facts) -> list[Finding]:
    """Finds everything that is off, what stops the run first."""
    checks = (_packages, _plan, _device, _memory, _disk, _colab, _hub)
    found = [*facts.dry_run.problems, *(finding for check in checks for finding in check(facts))]
    return sorted(found, key=lambda finding: finding.level != "stops")


def would_run(findings: list[Finding]) -> bool:
    """Returns whether nothing would stop the command."""
    return all(finding.level != "stops" for finding in findings)


def _packages(facts: Facts) -> Iterator[Finding]:
    if not facts.packages:
        yield Finding(
            "install", "warns", "hf_ext is not installed, so wanted versions are not known", "pip install -e ."
        )
    optimizer = optimizer_name(facts.args)
    asked = {
        "torchao": optimizer in TORCHAO_OPTIMIZERS,
        "bitsandbytes": asked_bits(facts.args) is not None or optimizer in BITSANDBYTES,
        "deepspeed": bool(facts.args.deepspeed),
        "flash-attn": facts.args.attention == "flash_attn",
    }
    for package in facts.packages:
        if (package.is_required or asked.get(package.name)) and (problem := package.problem):
            text = f"{' '.join(filter(None, (package.name, package.installed)))}: {problem}"
            yield Finding("package", "stops", text, f'pip install "{package.name}{package.wanted}"')
    for name in facts.args.report_to or []:
        if name in TRACKERS and find_spec(name) is None:
            remedy = f"pip install {name}, or --report_to none"
            yield Finding("tracker", "stops", f"--report_to {name}: {name} is not installed", remedy)


def _plan(facts: Facts) -> Iterator[Finding]:
    for decision in facts.main.plan.decisions if facts.main else []:
        if decision.status == "refused":
            reason, _, remedy = decision.reason.rpartition(": ")
            yield Finding("plan", "stops", f"{decision.name}: {reason or remedy}", remedy if reason else "leave it out")


def _device(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.is_described:
        return
    if machine.has_nvidia_driver and machine.num_gpus == 0:
        text = f"an NVIDIA driver is installed, but torch {installed_version('torch')} sees no GPU"
        remedy = "pip install --force-reinstall torch (a CUDA build); compare nvidia-smi; unset CUDA_VISIBLE_DEVICES"
        yield Finding("driver", "warns", text, remedy)
    elif machine.hardware.kind == "cpu" and not machine.has_nvidia_driver:
        remedy = "Colab: Runtime > Change runtime type > T4 GPU; --device t4 shows what one would take"
        yield Finding("gpu", "warns", "no GPU: models run on the CPU", remedy)
    if machine.num_gpus > 1 and facts.args.world_size == 1:
        text = f"{machine.num_gpus} GPUs, and one process"
        report = facts.main and facts.main.memory
        file = "fsdp2.yaml" if isinstance(report, MemoryReport) and not report.fits else "ddp.yaml"
        remedy = f"accelerate launch --config_file {file} --num_processes {machine.num_gpus} ..."
        yield Finding("processes", "warns", text, remedy)


def _memory(facts: Facts) -> Iterator[Finding]:
    room = usable_memory(facts.machine)
    main = facts.main
    if main is not None and main.schedule is not None and main.schedule.steps < 1:
        yield Finding("steps", "stops", "nothing would be trained: no step", "--num_train_epochs 1 or more")
    if room is None or main is None:
        return
    is_free = facts.machine.hardware.kind == "cpu" and not facts.machine.is_described
    have = f"{facts.machine.hardware.name} has {room / 2**30:.1f} GiB{' free' if is_free else ''}"
    report = main.memory if isinstance(main.memory, MemoryReport) else None
    options = report.options(bool(facts.args.max_tokens_per_batch)) if report else ""
    stored = max(report.stored if report else 0, main.encoding_bytes)
    remedy = options or "a smaller encoder, or a larger card"
    if not options and any(part.training != "frozen" for part in main.stage.parts):
        remedy = f"--use_peft (LoRA), {remedy}"
    if stored > room:
        remedy += ", or several cards that share the weights (fsdp2.yaml)"
        text = f"weights, gradients and optimizer need {stored / 2**30:.1f} GiB, {have}"
        yield Finding("memory", "stops", text, remedy)
    elif report and not report.fits:
        text = (
            f"a step on the longest rows takes {report.forecast.peak / 2**30:.1f} GiB, {have}, of which "
            f"{(report.room or 0) / 2**30:.1f} are counted on"
        )
        yield Finding("memory", "stops", text, remedy)


def _disk(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    main = facts.main
    if main is not None and facts.args.save_total_size_gb is not None:
        try:
            check_budget(main.checkpoint, read_policy(facts.args), main.exported_bytes)
        except ArgumentError as error:
            first, *rest = str(error).splitlines()
            smallest = next((line for line in rest if line.startswith("Smallest")), "a larger --save_total_size_gb")
            yield Finding("budget", "stops", first.rstrip(":"), smallest)
    remedies = {
        "output_dir": "another --output_dir; for want of room --save_total_limit 1, --preset max_speed+low_disk",
        "cache_dir": "another --embedding_cache_dir, or free space there",
        "hub_cache": "export HF_HOME=/path/with/room, or free space there",
    }
    for name, needed in facts.needed_bytes.items():
        free = machine.free_bytes[name]
        folder = getattr(machine, name)
        if needed and not machine.is_writable[name]:
            yield Finding("disk", "stops", f"{folder}: nothing can be written there", remedies[name])
        elif needed > free:
            text = f"{folder}: {needed / GB:.2f} GB are needed and {free / GB:.2f} GB are free"
            yield Finding("disk", "stops", text, remedies[name])


def _colab(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if not machine.in_colab:
        return
    on_drive = Path(machine.output_dir).is_relative_to(COLAB_DRIVE)
    if on_drive and not machine.drive_is_mounted:
        remedy = 'from google.colab import drive; drive.mount("/content/drive")'
        yield Finding("drive", "stops", f"{machine.output_dir}: Drive is not mounted", remedy)
    elif not on_drive:
        text = f"{machine.output_dir} vanishes with this Colab session"
        yield Finding("drive", "warns", text, f"mount Drive and --output_dir {COLAB_DRIVE}/MyDrive/run")
    elif machine.free_bytes["output_dir"] < facts.needed_bytes["output_dir"] + DRIVE_MARGIN_BYTES:
        text = f"Drive is nearly full: {machine.free_bytes['output_dir'] / GB:.2f} GB are free"
        remedy = "empty Drive's trash; --preset max_speed+low_disk --save_total_size_gb with what may be used"
        yield Finding("drive", "warns", text, remedy)
    total = facts.total_seconds
    if total and total[1] > COLAB_HOURS * 3600 and facts.args.max_hours is None:
        text = f"the run may take {total[1] / 3600:.0f} h, and Colab ends a session after {COLAB_HOURS:.0f} h or less"
        yield Finding("session", "warns", text, "--max_hours 11.5, then run the same command again: it continues")


def _hub(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.hub_is_offline and facts.needed_bytes["hub_cache"]:
        names = ", ".join(part.name for part in facts.main.stage.parts) if facts.main else "the encoders"
        text = f"HF_HUB_OFFLINE is set, and weights are not all in {machine.hub_cache} ({names})"
        yield Finding("offline", "stops", text, "unset HF_HUB_OFFLINE, or give folders")
    if not facts.args.push_to_hub:
        return
    if machine.hub_is_offline:
        yield Finding("push", "stops", "--push_to_hub with HF_HUB_OFFLINE set", "unset HF_HUB_OFFLINE, or push later")
    elif not machine.has_token:
        remedy = "hf auth login, or export HF_TOKEN=... (a token that may write)"
        yield Finding("push", "stops", "--push_to_hub without a Hugging Face token", remedy)
