"""What `PushProcess` runs: reads a push as JSON from standard input, does it, and answers with JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from typing import Any

from ..disk import describe_failure, is_disk_failure
from ..errors import HfExtError, RunEnded
from .pushing import push_folder, verify_push


def main() -> None:
    """The answer is a `Push`, or the name and the message of an error."""
    # The token comes this way and no other: arguments and environment of a process can be read by others.
    asked = json.load(sys.stdin)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print(json.dumps(_do(asked)))


def _do(asked: dict[str, Any]) -> dict[str, Any]:
    access = asked["access"]
    try:
        push = push_folder(asked["folder"], asked["repo_id"], **asked["push"], **access)
        if asked["into"] is not None:
            verify_push(push, asked["into"], **access)
    except (HfExtError, RunEnded) as error:
        return {"error": type(error).__name__, "text": str(error)}
    except OSError as error:
        if not is_disk_failure(error):
            raise
        return {"error": "DiskFailure", "text": describe_failure(error, error.filename or asked["folder"])}
    return {"push": dataclasses.asdict(push)}


if __name__ == "__main__":
    main()
