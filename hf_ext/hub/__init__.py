"""Pushes a trained model to the Hugging Face Hub by allow-list, and proves by downloading it that it arrived.

`huggingface_hub` transfers; here is what it leaves open: which files may leave the machine, that they stay the same
while they are sent, that no token is among them, and that a push which failed is an error that says how to repeat it.
`python -m hf_ext.hub FOLDER REPO_ID` pushes and verifies a folder again.
"""

from .allowed import allow_list
from .attempts import HubError
from .pushing import Push, push_folder, verify_push

__all__ = ["HubError", "Push", "allow_list", "push_folder", "verify_push"]
