"""Where the time of a process went, by phase."""

import time

from hf_ext.startup import begin_phases, end_phases, phase


@phase("outer")
def wait() -> None:
    time.sleep(0.05)
    with phase("inner"):
        time.sleep(0.2)


def test_an_inner_phase_is_no_part_of_the_outer_one_and_an_error_or_a_run_ends_it():
    end_phases()
    time.sleep(0.1)
    begin_phases()  # what is between two runs is of neither
    wait()
    try:
        with phase("outer"):
            raise KeyError
    except KeyError:
        time.sleep(0.1)  # of whatever ran before
    found = end_phases()
    assert 0.05 <= found["outer"]["wall_s"] < 0.15 < 0.2 <= found["inner"]["wall_s"] < 0.3
    assert found["outer"]["cpu_s"] < 0.05  # asleep
    assert 0.35 <= sum(one["wall_s"] for one in found.values()) < 0.45
