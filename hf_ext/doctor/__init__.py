"""Before a run: what this machine can do, what the run would take, what is off, and the remedy."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .command import examine
else:
    __getattr__, __dir__, __all__ = offer(__name__)
