"""The draft of a model card that Trainer and PEFT write, and what the Hub would reject of it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

_TEMPLATE = "[More Information Needed]"


def is_draft(card: bytes) -> bool:
    """Whether a README.md is PEFT's template, in which nobody has written."""
    return card.count(_TEMPLATE.encode()) > 3


def drop_local_base(path: Path) -> None:
    """Takes a `base_model`, and the tag of it, out of a card's metadata if it is a path: the Hub refuses such a push.

    Raises:
        OSError: the card cannot be read or written.
    """
    card = ModelCard.load(path)
    base = card.data.base_model
    if isinstance(base, str) and not _is_repo_id(base):
        del card.data.base_model
        card.data.tags = [tag for tag in card.data.tags or [] if base not in tag] or None
        card.save(path)


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()
