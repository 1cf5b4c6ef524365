"""The parts of a run that save: checkpoints, what a run continues from, model folders, and pushes to the Hub."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .exporter import Exporter
    from .pusher import Pusher
    from .resumer import Resumer
    from .rotation import Retention
    from .saver import Saver
else:
    __getattr__, __dir__, __all__ = offer(__name__)
