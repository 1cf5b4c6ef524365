"""Which attention the configuration of an encoder names: models may share it, and each run holds its own choice."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from transformers import PreTrainedConfig, PreTrainedModel

from .process_settings import Held

_HELD: dict[int, Held[str]] = {}  # by the id of a configuration, which has no hash; gone with it


def hold_attention(encoder: PreTrainedModel, name: str | None = None) -> Callable[[], None]:
    """Has an encoder, and all that share its configuration, compute attention by `name`; what it returns lets go.

    Without a name by what no run has set.

    Raises:
        ValueError, ImportError: transformers does not have this attention for the encoder.
    """
    key = id(encoder.config)
    if key not in _HELD:
        config = ref(encoder.config, lambda _: _HELD.pop(key))
        _HELD[key] = _make(ref(encoder), config)
    return _HELD[key].hold(_HELD[key].read_before() if name is None else name)


def _make(encoder: ref[PreTrainedModel], config: ref[PreTrainedConfig]) -> Held[str]:
    """The setting of a configuration, checked by an encoder as long as there is it; keeps neither alive."""

    def read() -> str:
        found = config()
        return found._attn_implementation if found is not None else "sdpa"

    def write(name: str) -> None:
        checker, found = encoder(), config()
        if checker is not None:
            checker.set_attn_implementation(name)
        elif found is not None:
            found._attn_implementation = name

    return Held(read, write)
