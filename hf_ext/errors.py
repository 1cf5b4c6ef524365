"""What hf_ext raises. Every message names the offending value, what is allowed, and how to mend it."""


class HfExtError(ValueError):
    """Base of all errors that are about the user's input; also a `ValueError`."""


class ArgumentError(HfExtError):
    """A command-line, YAML or preset value that is unknown, malformed or contradicts another one."""


class DataError(HfExtError):
    """The user's data cannot be used as it is; names file, row, column, value, rule and remedy."""


class PlanRefused(HfExtError):
    """A requested speed-up would be wrong on this machine, model or data; the run does not start."""


class CacheError(HfExtError):
    """An embedding cache belongs to another encoder, tokenizer, pooling, dtype or length limit."""


class MissingDependencyError(ImportError):
    """An optional package is needed for what was asked; the message names the extra that brings it."""
