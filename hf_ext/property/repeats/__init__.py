"""`--folds` and `--num_seeds`: one command that makes several runs, and joins what they predict for rows not seen."""

from typing import TYPE_CHECKING

from ...faces import offer

if TYPE_CHECKING:
    from .pooling import Part, add_up, find_resampled, find_spread, save_held
    from .running import check, find_folds_of, is_repeated, refuse_alone, repeat, take_part
else:
    __getattr__, __dir__, __all__ = offer(__name__)
