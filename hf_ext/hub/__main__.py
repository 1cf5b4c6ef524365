"""Pushes a model folder to the Hub and verifies it: `python -m hf_ext.hub FOLDER REPO_ID`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..errors import exit_on_errors
from .pushing import push_folder, verify_push


def main() -> None:
    """Pushes a folder and verifies the push: `python -m hf_ext.hub FOLDER REPO_ID [--public] ...`."""
    parser = argparse.ArgumentParser(prog="python -m hf_ext.hub", description=__doc__)
    parser.add_argument("folder", help="Folder that save_model or save_pretrained wrote.")
    parser.add_argument("repo_id", help="owner/name, or name for the owner of the token.")
    parser.add_argument("--public", action="store_true", help="Make a new repository public, and accept a public one.")
    parser.add_argument("--revision", help="Branch, made if it is not there; left out, the main one.")
    parser.add_argument("--checkpoint", help="Checkpoint that is sent whole, too, as last-checkpoint/.")
    parser.add_argument("--endpoint", help="Address of the Hub; left out, HF_ENDPOINT or https://huggingface.co.")
    args = parser.parse_args()
    with exit_on_errors(), tempfile.TemporaryDirectory() as scratch:
        push = push_folder(
            args.folder,
            args.repo_id,
            checkpoint=args.checkpoint,
            private=not args.public,
            endpoint=args.endpoint,
            revision=args.revision,
        )
        verify_push(push, Path(scratch, "download"), endpoint=args.endpoint)
        print(f"{push.url}: {len(push.files)} files, downloaded again and equal byte for byte")


if __name__ == "__main__":
    main()
