"""Where the time of a process went, by phase."""

import time

from hf_ext.startup import phase, read_phases


@phase("outer")
def wait() -> None:
    time.sleep(0.05)
    with phase("inner"):
        time.sleep(0.2)


def test_an_inner_phase_is_no_part_of_the_outer_one_and_an_error_ends_it():
    wait()
    before = read_phases()
    wait()
    try:
        with phase("outer"):
            raise KeyError
    except KeyError:
        time.sleep(0.1)  # of whatever ran before
    after = read_phases()
    spent = {name: after[name]["wall_s"] - before[name]["wall_s"] for name in ("outer", "inner")}
    assert 0.05 <= spent["outer"] < 0.1 < 0.2 <= spent["inner"] < 0.3
    assert after["outer"]["cpu_s"] < 0.05  # asleep
    total = sum(one["wall_s"] for one in after.values()) - sum(one["wall_s"] for one in before.values())
    assert total >= 0.35
