"""`hf-ext`: what it prints, what it imports, and that it ends as the recipes' own scripts do."""

import importlib
import inspect
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from locations import ROOT

from hf_ext import __version__
from hf_ext.cli import COMMANDS, help_page, main
from hf_ext.startup import program_words, quick_imports

ASKED = ["train", "mlm", "generate", "sample", "predict", "evaluate", "doctor", "compare", "report", "resume"]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_the_help_page_fits_a_screen_and_names_every_command():
    lines = help_page().splitlines()
    assert 20 <= len(lines) <= 30
    assert max(map(len, lines)) <= 80
    listed = [
        line.split()[0] for line in lines if line.startswith("  ") and not line.startswith(("   ", "  hf-ext", "  acc"))
    ]
    assert listed == [*COMMANDS]
    assert set(ASKED) <= set(listed)


def test_help_is_quick_and_imports_no_library(tmp_path):
    code = (
        "import json, sys, time\nstart = time.perf_counter()\nfrom hf_ext.cli import main\nmain(['--help'])\n"
        "spent = time.perf_counter() - start\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'yaml', 'hf_ext.tasks'} & {*sys.modules})\n"
        "print(json.dumps([spent, heavy]))"
    )
    runs = [json.loads(run("-c", code, cwd=tmp_path).stdout.splitlines()[-1]) for _ in range(3)]
    assert min(spent for spent, _ in runs) < 0.5
    assert [heavy for _, heavy in runs] == [[], [], []]


def test_every_command_has_a_main_that_takes_words():
    for module, line in COMMANDS.values():
        assert len(inspect.signature(importlib.import_module(module).main).parameters) == 1
        assert line


def test_a_command_imports_its_own_module_alone_and_reads_its_words(tmp_path):
    code = "import sys; from hf_ext.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sorted(sys.modules))"
    done = run("-c", code, "report", "--run", "nowhere", cwd=tmp_path)
    of_commands = {module for module, _ in COMMANDS.values()}
    assert of_commands & {*done.stdout.split()} == {"hf_ext.reporting.report"}
    assert "nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1  # nothing that an import left


def test_kernels_that_a_library_looks_for_are_not_spoken_of_at_the_start(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quick_imports():
        logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community")
    assert not caplog.records
    logger.warning("said later")
    assert caplog.messages == ["said later"]


def test_a_command_that_reads_a_model_refuses_flags_of_training_on_line_and_in_yaml(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hf-ext"])
    (tmp_path / "a.yaml").write_text("num_train_epochs: 7\n")
    for words, said in (
        ("predict --model m --learning_rate 3", "--learning_rate is a flag of training; predict only reads the model"),
        (f"evaluate --models m --config {tmp_path}/a.yaml", "num_train_epochs is a flag of training; evaluate"),
        ("sample --model m --push_to_hub", "--push_to_hub is a flag of training; sample only reads the model"),
        ("predict --model m --outpt x", "unknown argument '--outpt', did you mean '--output'?"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 1
        assert said in capsys.readouterr().err


def test_help_of_a_command_that_reads_a_model_waits_for_no_model_code(tmp_path):
    code = "import sys; from hf_ext.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sorted(sys.modules))"
    for command in ("predict", "evaluate"):
        loaded = {*run("-c", code, command, "--help", cwd=tmp_path).stdout.split("\n")[-2].split()}
        assert {"hf_ext.arguments.parser", f"hf_ext.finished.{command}"} <= loaded
        assert not {"torch", "datasets", "pandas", "scipy", "hf_ext.tasks.running"} & loaded


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes `hf-ext toy` a module whose main has the given body."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hf-ext"])
    monkeypatch.setitem(COMMANDS, "toy", ("toy_recipe", "a toy"))

    def write(body: str) -> None:
        sys.modules.pop("toy_recipe", None)
        (tmp_path / "toy_recipe.py").write_text(f"from hf_ext.errors import *\ndef main(argv):\n    {body}\n")
        importlib.invalidate_caches()

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return write


def test_the_status_is_that_of_a_recipe_that_returns_one_and_a_bug_keeps_its_traceback(toy):
    for body, status in (("return 4", 4), ("return {'rmse': 1}", 0), ("return None", 0)):
        toy(body)
        assert main(["toy"]) == status
    toy("raise KeyError('ours')")
    with pytest.raises(KeyError):
        main(["toy"])


def test_other_ends_have_the_recipes_status_and_no_traceback(toy, capsys):
    for body, status, said in (
        ("raise ArgumentError('no such column')", 1, "ArgumentError: no such column"),
        ("raise TrainingStopped('saved step 5')", 75, "TrainingStopped: saved step 5"),
        ("raise RequirementsFailed('rmse')", 3, "RequirementsFailed: rmse"),
        ("raise KeyboardInterrupt", 75, "Interrupted by SIGINT"),
        ("raise ImportError('pip install anarcii')", 1, "pip install anarcii"),
    ):
        toy(body)
        with pytest.raises(SystemExit) as ended:
            main(["toy"])
        printed = capsys.readouterr().err
        assert ended.value.code == status
        assert said in printed
        assert "Traceback" not in printed


def test_unknown_words_name_the_nearest_and_all_that_there_are(capsys, monkeypatch):
    for words, said in (
        ("trian", r"unknown command 'trian', did you mean 'train'\? Commands: train, mlm"),
        ("--hlep", r"unknown argument '--hlep', did you mean '--help'\?"),
        ("--path gb2.yaml", r"no 'gb2.yaml' comes with hf_ext, did you mean 'gb1.yaml'\? Files: .*ddp.yaml"),
        ("--path gb1", "no 'gb1' comes with hf_ext, did you mean 'gb1.yaml'"),
        ("train --optimm x", r"did you mean '--optim'\? Run with --help all"),
        ("--path a b", "takes one name, not 2 words: a b"),
    ):
        monkeypatch.setattr(sys, "argv", ["hf-ext"])  # put back: a subcommand names itself there
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 1
        assert re.search(said, capsys.readouterr().err)


def test_paths_are_those_of_every_file_to_copy_that_comes_along(capsys):
    assert main(["--path"]) == 0
    listed = capsys.readouterr().out.split()
    here = [*ROOT.glob("recipes/configs/*.yaml"), *ROOT.glob("accelerate_configs/*.yaml"), *ROOT.glob("launch/*.*")]
    assert sorted(listed) == sorted(map(str, here))
    assert len({Path(path).name for path in listed}) == len(listed) > 22  # a name means one file
    assert main(["--path", "ddp.yaml"]) == 0
    assert capsys.readouterr().out == f"{ROOT / 'accelerate_configs' / 'ddp.yaml'}\n"


def test_the_version_is_printed_and_no_words_are_a_request_for_help(capsys):
    assert (main(["--version"]), capsys.readouterr().out) == (0, f"hf_ext {__version__}\n")
    assert (main([]), capsys.readouterr().out) == (0, help_page() + "\n")


def test_what_users_are_told_to_type_is_what_they_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/ann/my clone/recipes/predict.py", "--model", "m"])
    assert program_words() == ["/home/ann/my clone/recipes/predict.py"]
    monkeypatch.setattr(sys, "argv", ["hf-ext predict", "--model", "m"])
    assert program_words() == ["hf-ext", "predict"]
