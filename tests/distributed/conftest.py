"""One launch of two processes under FSDP2 for the tests of every commit: most of what one costs is imports."""

from pathlib import Path

import pytest
from sharded_launch import launch


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """An uninterrupted run of six steps, saved every second, one from its fourth, and one whose fourth lost a piece.

    And `short`, of `fsdp2_on_ranks.py`.
    """
    place = tmp_path_factory.mktemp("sharded")
    saved = [str(place / "whole" / f"checkpoint-{step}") for step in (2, 4)]
    launch(
        [
            {"folder": str(place / "whole"), "name": "end"},
            {"folder": str(place / "resumed"), "name": "end", "source": saved[1:]},
            {"folder": str(place / "lost"), "name": "end", "source": saved, "harm": "drop"},
            {"folder": str(place / "short"), "name": "short", "kind": "short"},
        ],
        place,
    )
    return place
