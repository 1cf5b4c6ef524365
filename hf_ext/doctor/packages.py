"""Versions: what is installed, what hf_ext wants, what each package is for, and the command that brings it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from ..optional import import_problem, installed_version

# Package -> (what it gates, name to import).
PURPOSES = {
    "torch": ("everything", "torch"),
    "transformers": ("everything", "transformers"),
    "accelerate": ("several devices", "accelerate"),
    "datasets": ("reading data", "datasets"),
    "peft": ("LoRA (--use_peft)", "peft"),
    "safetensors": ("checkpoints", "safetensors"),
    "huggingface_hub": ("downloads, pushes", "huggingface_hub"),
    "jinja2": ("the report", "jinja2"),
    "evaluate": ("metrics as modules", "evaluate"),
    "faesm": ("--attention faesm", "faesm"),
    "sentencepiece": ("T5 encoders' tokenizers", "sentencepiece"),
    "flash-attn": ("flash attention 2", "flash_attn"),
    "torchao": ("--optim adamw_torch_8bit", "torchao"),
    "bitsandbytes": ("--load_in_8bit, 4bit", "bitsandbytes"),
    "deepspeed": ("--deepspeed, ZeRO", "deepspeed"),
}


@dataclass(frozen=True)
class Package:
    """One distribution. `wanted` is a version rule (">=5.24,<6"), `extra` the optional group that brings it.

    `problem`: None where it is fine, else "not installed", "too old" (or too new), or what its import raised.
    """

    name: str
    installed: str | None
    wanted: str
    purpose: str
    extra: str | None = None
    problem: str | None = None

    @property
    def is_required(self) -> bool:
        """Whether hf_ext never runs without it."""
        return self.extra is None

    @property
    def command(self) -> str:
        """What installs a version that fits."""
        return f'pip install "{self.name}{self.wanted}"'


def read_packages() -> list[Package]:
    """The packages of `PURPOSES`, required ones first, in the order of the project's own requirements.

    Returns:
        Nothing where hf_ext runs without being installed, so that no requirements are known.

    Cost: the import of optional packages that are installed, once; required ones are imported already.
    """
    try:
        lines = requires("hf_ext") or []
    except PackageNotFoundError:
        return []
    named = {one.name: one for one in map(Requirement, lines[::-1])}  # the first line of each: dev brings some again
    packages = [_read_package(named[name]) for name in reversed(named) if name in PURPOSES]
    return sorted(packages, key=lambda package: not package.is_required)


def _read_package(requirement: Requirement) -> Package:
    purpose, module = PURPOSES[requirement.name]
    # 'extra == "flash"', as setuptools writes it
    extra = str(requirement.marker).split('"')[1] if requirement.marker and "extra" in str(requirement.marker) else None
    wanted = ",".join(sorted(str(rule) for rule in requirement.specifier)[::-1])
    return check_package(requirement.name, installed_version(requirement.name), wanted, purpose, extra, module)


def check_package(
    name: str, installed: str | None, wanted: str, purpose: str, extra: str | None = None, module: str | None = None
) -> Package:
    """Compares a version with the rule; of one that fits, tries the import, where `module` names one."""
    problem = None
    if installed is None:
        problem = "not installed"
    elif not Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True):
        problem = f"{wanted} is wanted"
    elif module:
        problem = import_problem(module)
    return Package(name, installed, wanted, purpose, extra, problem)
