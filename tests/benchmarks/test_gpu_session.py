"""`benchmarks/gpu_session.py`: one command that measures a card, whatever becomes of its parts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_session
import pytest
import torch
from gpu_session import PARTS, open_session, parse_arguments
from gpu_tables import parts_table, speed_table

from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"device": "H100-SXM", "kind": "cuda", "memory_gib": 80.0}
SESSION = {"size": "full", "machine": MACHINE, "commit": "1", "parts": {}}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict:
    """A whole session at toy size, in a process without a GPU."""
    path = tmp_path_factory.mktemp("session") / "toy.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, gpu_session.__file__, "--size", "toy", "--output", str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, path.read_text()[-3000:]
    return json.loads(path.read_text())


@pytest.mark.nightly
def test_a_toy_session_finishes_every_part_and_measures_what_it_says(toy):
    assert {name: part["status"] for name, part in toy["parts"].items()} == dict.fromkeys(PARTS, "finished")
    found = {name: part["result"] for name, part in toy["parts"].items()}
    assert any("test_varlen_on_a_gpu" in line for line in toy["parts"]["tests"]["log_end"])
    assert [*found["attention"]] == ["faesm", "fa2", "flex"]
    for measured in (*found["encoding"].values(), *found["attention"].values()):
        assert measured["relative_difference"] < 1e-5
        assert min(measured["times_as_fast"]) > 0
    for name in ("full_esm2", "lora_esm2", "full_esmc", "lora_esmc"):
        assert {*found[name]["sides"]} == {"trainer", "max_speed"}
        # The same rows and masks from the same weights, in another order.
        losses = [side["final_loss"]["value"] for side in found[name]["sides"].values()]
        assert losses[0] == pytest.approx(losses[1], abs=0.1)
    assert all(abs(row["predicted_by_allocations"] - 1) < 0.05 for row in found["memory"]["rows"])
    assert [(row["file"], row["passed"]) for row in found["processes"]["rows"]] == [("ddp", True)]


@pytest.mark.nightly
def test_a_session_of_a_card_fills_the_tables_with_what_failed_in_it_and_a_toy_does_not(toy, tmp_path):
    (tmp_path / "gpu_session_toy.json").write_text(json.dumps(toy))
    assert speed_table(tmp_path).count("not measured") == 5 * 5
    session = {**toy, "size": "full", "machine": MACHINE}
    session["parts"]["tests"] = {"status": "timed out", "result": None, "log_end": ["test_a .."]}
    del session["parts"]["processes"]
    (tmp_path / "gpu_session.json").write_text(json.dumps(session))
    speed, parts = speed_table(tmp_path), parts_table(tmp_path)
    assert len(speed.splitlines()) == 2 + 4 * 2 + 2 * 2
    assert "not measured" not in speed
    rows = {line.split("|")[2].strip(): line for line in parts.splitlines()}
    assert "timed out" in rows["tests"]
    assert "not measured" in rows["processes"]
    assert "ledger off by" in rows["memory"]
    assert re.search(r"faesm_sdpa is [\d.]+x \[.*\] as fast as blocked; fa2 is .*; flex is ", rows["attention"])
    session["parts"]["attention"]["result"] = {"flex": {"problem": "RuntimeError: no"}}
    (tmp_path / "gpu_session.json").write_text(json.dumps(session))
    assert "| flex: RuntimeError: no |" in re.sub(" +", " ", parts_table(tmp_path))


def test_the_page_says_where_faesms_kernel_was_not_measured_and_why(tmp_path):
    tests = {"status": "finished", "result": None, "log_end": ["3 passed, 1 skipped in 20 s"]}
    for version in (None, "2.8.3"):
        session = {**SESSION, "versions": {"flash-attn": version}, "parts": {"tests": tests}}
        (tmp_path / "gpu_session.json").write_text(json.dumps(session))
        (row,) = [line for line in parts_table(tmp_path).splitlines() if " tests " in line]
        assert ("flash-attn was not installed: faesm's kernel not measured" in row) is (version is None)


def test_parts_that_crash_raise_or_hang_are_recorded_and_later_ones_run(tmp_path, monkeypatch):
    codes = {
        "tests": "import os; os.abort()",
        "encoding": f"open({str(ROOT / 'absent')!r})",
        "memory": "import time; print('begun', flush=True); time.sleep(60)",
        "processes": "import sys; open(sys.argv[1], 'w').write('[1]')",
    }
    monkeypatch.setattr(
        gpu_session, "make_command", lambda part, s, h, folder: ["-c", codes[part], f"{folder}/result.json"]
    )
    monkeypatch.setattr(gpu_session, "PARTS", dict.fromkeys(codes, 1.0))
    path = tmp_path / "session.json"
    words = ["--size", "toy", "--output", str(path), "--minutes", "0.07"]
    assert gpu_session.main(words) == 1
    found = json.loads(path.read_text())["parts"]
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {
        **{"tests": "failed with exit code -6", "encoding": "failed with exit code 1"},
        **{"memory": "timed out", "processes": "finished"},
    }
    assert "'PROJECT/absent'" in found["encoding"]["log_end"][-1]
    assert found["memory"]["log_end"] == ["begun"]
    assert found["processes"]["result"] == [1]
    # Started again it repeats what failed and keeps what finished.
    codes |= {"tests": "", "encoding": "", "memory": "", "processes": "1 / 0"}
    assert gpu_session.main(words) == 0


def test_only_a_session_of_this_machine_size_and_commit_is_continued(tmp_path):
    path = tmp_path / "session.json"
    done = {**SESSION, "parts": {"tests": {"status": "finished"}, "memory": {"status": "timed out"}}}
    path.write_text(json.dumps(done))
    assert open_session(path, SESSION)["parts"] == done["parts"]
    assert open_session(path, {**SESSION, "commit": "2"})["parts"] == {}
    for changed in ({"machine": {**MACHINE, "device": "A100"}}, {"size": "toy"}):
        with pytest.raises(ArgumentError, match=r"of another machine or --size.*--output"):
            open_session(path, {**SESSION, **changed})
    for text in ('{"runs": []}', '{"machine": null, "size": "full", "parts": {}}', "[]", "{"):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="holds no session"):
            open_session(path, SESSION)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they run, and the first takes half an hour")
def test_without_a_gpu_it_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ArgumentError, match=r"No GPU: .*--size toy"):
        gpu_session.main(["--output", str(tmp_path / "full.json")])
    assert not [*tmp_path.iterdir()]


def test_the_commands_of_the_page_parse_and_every_part_stands_on_it():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"```bash\n(.*gpu_session.*?)\n```", page)
    given = [parse_arguments(shlex.split(line.partition("gpu_session.py")[2])) for line in lines]
    assert [(args.size, args.minutes, args.parts) for args in given] == [("full", 30.0, [*PARTS])]
    table = page.partition("| part | what it measures |")[2].partition("\n\n")[0]
    assert all(f"`{part}`" in table for part in PARTS)
    assert sum(PARTS.values()) == 30.0
