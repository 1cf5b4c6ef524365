"""Says whether an optional package really works here, by importing it once under guard; nothing at module import."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from hf_ext.errors import MissingDependencyError


@functools.cache
def import_problem(package: str) -> str | None:
    """Imports a package once and keeps what went wrong: installed is not the same as usable.

    The answer is kept for the process. After something that changes it (a compatibility shim put in place before the
    import), call `import_problem.cache_clear()`.

    Args:
        package: an importable name; the module that will really be used, not only its parent ("faesm.esm": the bare
            "faesm" imports even where its models do not).

    Returns:
        None if the import works, else one line: "is not installed", or the error's type and first line.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and (package == error.name or package.startswith(f"{error.name}.")):
            return "is not installed"
        return _one_line(error)
    except Exception as error:  # CUDA or another torch is missing, a registry is old: seen are ten classes
        return _one_line(error)
    return None


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Imports a package that was asked for, or stops with the command that brings it.

    Args:
        package: an importable name ("peft").
        extra: the extra of hf_ext that brings it ("lora").
        purpose: what needs it, as it reads after "needed for" ("--lora").

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: the package is not installed, or is installed and does not import; names the extra, the
            purpose and, for the latter, the reason.
    """
    problem = import_problem(package)
    if problem is None:
        return importlib.import_module(package)
    command = f'pip install "hf_ext[{extra}]"'
    if problem == "is not installed":
        raise MissingDependencyError(f"{package} is needed for {purpose} and is not installed. Run: {command}")
    raise MissingDependencyError(
        f"{package} is needed for {purpose} and is installed, but does not import here ({problem}). "
        f"A version that fits comes with: {command}"
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of a distribution ("flash-attn"), None where it is not installed. Imports nothing.

    Read once per process: a plan is written a dozen times before the first step.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
