"""`benchmarks/nightly.py`: a part in which nothing ran has not passed, and what was skipped is written down."""

import nightly

SKIPPED = """
import pytest

@pytest.mark.skip(reason="no such package")
def test_a():
    pass
"""


def test_what_was_skipped_is_written_down_and_skipped_tests_alone_are_not_green(tmp_path):
    for text, counts in ((SKIPPED, (False, 0, 1)), (SKIPPED + "def test_b(): pass\n", (True, 1, 1))):
        (tmp_path / "test_x.py").write_text(text)
        found = nightly.run("-n", "0", "-p", "no:cacheprovider", str(tmp_path / "test_x.py"))
        assert (found["passes"], found.get("passed", 0), found["skipped"]) == counts
        assert [line.rpartition(": ")[2] for line in found["skips"]] == ["no such package"]
        assert ("failures" in found) is not found["passes"]
