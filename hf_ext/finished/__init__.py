"""What is done with a finished model: predict, evaluate and compare, list and convert checkpoints."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .comparing import compare, format_difference, load_test
    from .ranking import acquire, choose_batch
else:
    __getattr__, __dir__, __all__ = offer(__name__)
