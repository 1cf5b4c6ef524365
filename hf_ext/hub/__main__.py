"""Pushes a model folder to the Hub: `python -m hf_ext.hub FOLDER REPO_ID`."""

from __future__ import annotations

import argparse

from ..errors import exit_on_errors
from .push import push_folder


def main() -> None:
    """Pushes a folder: `python -m hf_ext.hub FOLDER REPO_ID [--public] [--revision BRANCH]`."""
    parser = argparse.ArgumentParser(prog="python -m hf_ext.hub", description=__doc__)
    parser.add_argument("folder", help="Folder that save_model or save_pretrained wrote.")
    parser.add_argument("repo_id", help="owner/name, or name for the owner of the token.")
    parser.add_argument("--public", action="store_true", help="Make a new repository public, and accept a public one.")
    parser.add_argument("--revision", help="Branch, made if it is not there; left out, the main one.")
    args = parser.parse_args()
    with exit_on_errors():
        commit = push_folder(args.folder, args.repo_id, private=not args.public, revision=args.revision)
        print(f"{commit.commit_url}: every file there is the one that was sent")


if __name__ == "__main__":
    main()
