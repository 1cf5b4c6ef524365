"""The benchmark of generators: all sides train on the same rows from the same weights, and parts are kept."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hf_ext.data.demo import make_demo_pairs

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "generator_speed.py"


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs the script on few demo pairs; its JSON."""
    make_demo_pairs().select(range(60)).to_csv(tmp_path / "pairs.csv", index=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("generator_speed", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*words: str) -> dict:
        sizes = {"rows": 6, "eval_rows": 2, "rounds": 1, "antigens": 2, "samples": 2, "max_new_tokens": 4}
        settings = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        output = tmp_path / "speed.json"
        monkeypatch.setattr(
            sys,
            "argv",
            ["generator_speed.py", str(tmp_path / "pairs.csv"), "--output_json", str(output), *settings, *words],
        )
        script.main()
        return json.loads(output.read_text())

    return run


@pytest.mark.nightly
def test_sides_have_the_same_rows_and_weights_and_a_part_replaces_its_own_entry(measure):
    result = measure("--parts", "training", "sampling")
    for name in ("lstm", "transformer"):
        ours, stock = (result["training"][name]["sides"][side] for side in ("hf_ext", "stock"))
        assert [one["steps"] for one in ours["passes"]] == [one["steps"] for one in stock["passes"]] == [1]
        # One step of all rows from the same weights; dropout and half precision apart the losses are one number.
        assert abs(stock["hf_ext_loss_minus_its"][0]) < 0.1
        ratio = stock["passes"][0]["cpu_s"] / ours["passes"][0]["cpu_s"]
        assert stock["hf_ext_is"]["cpu_s"] == pytest.approx({"median": ratio, "least": ratio, "most": ratio})
        assert not result["training"][name]["half_precision"]["stock"]  # ours leaves nothing behind in the process
        assert [one["antibodies"] for one in result["sampling"][name]["passes"]["stock"]] == [4]
        assert [one["antibodies"] for one in result["sampling"][name]["passes"]["hf_ext"]] == [4]
    assert result["training"]["lstm_over_transformer"]["cpu_s"]["median"] > 0
    again = measure("--parts", "sampling")
    assert again["training"] == result["training"]
    assert again["sampling"] != result["sampling"]


@pytest.mark.nightly  # with the one above it takes more than the default suite may
def test_the_encoder_runs_where_its_states_are_not_cached(measure, demo_encoders):
    result = measure("--parts", "encoder", "--antigen_encoder", demo_encoders[1])["encoder"]["esm"]
    assert {*result["sides"]} == {"hf_ext", "encoder in every step", "stock"}
    # States are the same, cached or not: so is the loss after a step with the same draws.
    assert abs(result["sides"]["encoder in every step"]["hf_ext_loss_minus_its"][0]) < 1e-3


def test_the_part_that_needs_an_encoder_asks_for_one(measure, capsys):
    with pytest.raises(SystemExit):
        measure("--parts", "encoder")
    assert "needs --antigen_encoder" in capsys.readouterr().err
