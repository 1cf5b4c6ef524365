"""Pushes models to the Hugging Face Hub by allow-list, compares what arrived with what was sent, and fetches them.

`huggingface_hub` transfers; here is what it leaves open: which files may leave the machine, that no token is among
them, that a push is one commit or none, and that one which failed says how to repeat it.
`python -m hf_ext.hub FOLDER REPO_ID` pushes a folder again.
"""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .allowed import CARD, is_draft, model_files
    from .push import HubError, open_repository, push_folder
else:
    __getattr__, __dir__, __all__ = offer(__name__)
