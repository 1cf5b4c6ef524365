"""Two real processes fill one embedding cache: each sequence once in the world, and after a kill what was missing."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from cache_on_ranks import make_few_antigens
from equal_cases import COLUMNS, write_encoders
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly

SCRIPT = HELPERS / "cache_on_ranks.py"


def fill(folder: Path) -> list[dict]:
    run_on_ranks(SCRIPT, folder, "go_on")
    return [json.loads((folder / f"encoded-{rank}.json").read_text()) for rank in range(2)]


def shards(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("rows-*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_encoders(folder / "encoders")
    return folder


@pytest.fixture(scope="module")
def distinct(folder) -> dict[str, set[str]]:
    """Sequences of each input."""
    rows = make_few_antigens(folder / "encoders")[2]
    return {name: set(rows[name][:]) for name in COLUMNS}


@pytest.fixture(scope="module")
def whole(folder) -> tuple[list[dict], dict[str, bytes]]:
    """What two processes encoded, and the files they left."""
    return fill(folder), shards(folder / "cache")


def test_each_sequence_is_encoded_once_in_the_world_and_the_work_is_shared(whole, distinct):
    reports = whole[0]
    for name, sequences in distinct.items():
        both = [Counter(report["counts"].get(name, {})) for report in reports]
        assert both[0] + both[1] == Counter(dict.fromkeys(sequences, 1))
        if len(sequences) > 64:
            assert min(own.total() for own in both) > len(sequences) / 4
    assert [report["num_encoded"] for report in reports] == [sum(map(len, distinct.values()))] * 2


def test_a_process_with_nothing_to_encode_waits_for_the_other(whole, distinct):
    assert len(distinct["antigen"]) == 3  # one shard
    assert "antigen" in whole[0][0]["counts"]
    assert "antigen" not in whole[0][1]["counts"]


def test_after_a_kill_what_was_missing_is_encoded_once_into_the_same_files(whole, folder, distinct):
    shutil.rmtree(folder / "cache")
    run_on_ranks(SCRIPT, folder, "kill", is_killed=True)
    stored = shards(folder / "cache")
    assert 0 < len(stored) < len(whole[1])
    encoded = [report["num_encoded"] for report in fill(folder)]
    assert 0 < encoded[0] < sum(map(len, distinct.values()))
    assert encoded[0] == encoded[1]
    assert shards(folder / "cache") == whole[1]


def test_a_full_cache_leaves_nothing_to_encode_for_any_process(whole, folder):
    assert [(report["num_encoded"], report["counts"]) for report in fill(folder)] == [(0, {})] * 2
