"""Two real processes push: one talks to the Hub, both hear how it went."""

import json
from pathlib import Path

import pytest
from hub_server import Fault, serve_hub
from locations import HELPERS
from ranks import run_on_ranks

TOKEN = "hf_" + "canary" * 5 + "bird"


@pytest.mark.nightly
def test_both_processes_hear_how_a_push_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub(monkeypatch, TOKEN) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.faults.append(Fault("POST", "me/broken/commit", 99, status=403))
        run_on_ranks(HELPERS / "push_on_ranks.py", tmp_path)
        first, second = (json.loads((tmp_path / f"push-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["good"] == hub.repositories["me/good"].branches["main"]
    assert "was not pushed to me/broken" in first["broken"]
    assert hub.repositories["me/good"].messages[-1] == "End of training"
    assert hub.count("POST", "me/good/commit") == len(hub.repositories["me/good"].messages) - 1  # one process talks
