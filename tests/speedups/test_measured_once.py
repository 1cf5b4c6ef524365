"""What is measured of a machine is kept for it: a fresh run chooses as the one before, whatever the clock says now."""

import pytest
from tiny_masked_lm import make_trainer

from hf_ext.speedups import attention, cpu_matmul, cpu_threads, half_rate

pytestmark = pytest.mark.usefixtures("bf16_cpu", "own_home")
NAMES = ("cpu_matmul", "precision", "cpu_threads", "attention")


@pytest.fixture
def clock(monkeypatch):
    """Sets how many times as fast the clock finds what may be chosen."""
    for name in cpu_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    monkeypatch.setattr(cpu_matmul, "MAX_ERROR", 1.0)

    def say(gain):
        monkeypatch.setattr(half_rate, "measure_half_gain", lambda: gain)
        monkeypatch.setattr(cpu_matmul, "times_as_fast", lambda *given: gain)
        monkeypatch.setattr(cpu_threads, "measure_rates", lambda *given: {1: [1.0] * 4, 2: [gain] * 4})
        monkeypatch.setattr(attention, "measure_gain", lambda *given: gain)

    return say


def choose(folder, names=NAMES, **given) -> dict:
    """What a run in `folder` is on, by speed-up."""
    trainer = make_trainer(folder, speedups=list(names), **given)
    trainer.plan.save(folder)
    trainer.end()
    found = {name: trainer.plan[name] for name in names}
    return {name: one.evidence.get("kernel", one.evidence.get("threads", one.status)) for name, one in found.items()}


FAST = {"cpu_matmul": "applied", "precision": "applied", "cpu_threads": 2, "attention": "blocked"}
SLOW = {"cpu_matmul": "skipped", "precision": "skipped", "cpu_threads": 1, "attention": "blocked"}  # in float32


def test_a_second_fresh_run_chooses_as_the_first_whatever_the_clock_says(clock, tmp_path, monkeypatch):
    clock(3.0)
    assert choose(tmp_path / "first") == FAST
    clock(0.5)
    assert choose(tmp_path / "second") == FAST
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))  # nothing was measured there yet
    assert choose(tmp_path / "third") == SLOW


def test_what_a_run_began_with_goes_before_what_is_kept_of_the_machine(clock, tmp_path, monkeypatch):
    clock(3.0)
    choose(tmp_path / "begun")
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    clock(0.5)
    assert choose(tmp_path / "fresh")["precision"] == "skipped"
    assert choose(tmp_path / "begun") == FAST


def test_what_is_no_number_is_measured_anew_and_kept(clock, tmp_path):
    clock(3.0)
    choose(tmp_path / "first", ["precision"])
    (kept,) = (tmp_path / "home" / ".cache" / "hf_ext").rglob("*.json")
    right = kept.read_text()
    texts = ["", "{", "[]", "7", "[" * 9999, "\0", right[:-3]]
    texts += [right.replace("3.0", other) for other in ("null", '"three"', "NaN", "0", f"{10**400}", "[3.0]")]
    assert right not in texts
    for i, text in enumerate(texts):
        kept.write_text(text)
        for gain in (0.5, 3.0):
            clock(gain)
            assert choose(tmp_path / f"{i} {gain}", ["precision"]) == {"precision": "skipped"}, text


def test_where_nothing_can_be_kept_a_process_measures_once(clock, tmp_path):
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "hf_ext").write_text("a file where the folder would be")
    given = {"embedding_cache_dir": str(tmp_path / "home" / ".cache" / "hf_ext" / "nor here")}
    clock(3.0)
    assert choose(tmp_path / "first", **given) == FAST
    clock(0.5)
    assert choose(tmp_path / "second", **given) == FAST


def test_without_a_home_it_is_kept_beside_embeddings(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/dev/null")
    for gain, folder in ((3.0, "first"), (0.5, "second")):
        clock(gain)
        assert choose(tmp_path / folder, embedding_cache_dir=str(tmp_path / "cache")) == FAST


def test_of_runs_that_measure_at_the_same_time_the_first_to_end_decides_for_all(clock, tmp_path, monkeypatch):
    clock(3.0)

    def measure():
        clock(3.0)
        assert choose(tmp_path / "meanwhile", ["precision"]) == {"precision": "applied"}
        return 0.5

    monkeypatch.setattr(half_rate, "measure_half_gain", measure)
    assert choose(tmp_path / "slow", ["precision"]) == {"precision": "applied"}


def test_other_settings_are_measured_for_themselves(clock, tmp_path, monkeypatch):
    clock(3.0)
    assert choose(tmp_path / "first")["precision"] == "applied"
    clock(0.5)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert choose(tmp_path / "narrower")["precision"] == "skipped"
