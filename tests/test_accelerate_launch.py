"""What the launcher files give a script: devices, precision, threads, processes. The files for CPUs really launch."""

import json

import psutil
from launcher_files import FOLDER, launcher_environment
from launches import Launch, run_recipe
from transformers import TrainingArguments


def test_the_script_gets_the_stated_precision_devices_and_use_of_the_cpu(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, precision, gpus, on_cpu in (
        ("cpu", "no", "", "True"),
        ("2cpu_ddp", "no", "-1,-1", None),  # dropped for several processes
        ("1gpu_t4_fp16", "fp16", "0", "False"),
        ("1gpu_h100_bf16", "bf16", "0", "False"),
    ):
        environment = launcher_environment(FOLDER / f"{name}.yaml")
        assert (environment.get("CUDA_VISIBLE_DEVICES"), environment.get("ACCELERATE_USE_CPU")) == (gpus, on_cpu)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", environment["ACCELERATE_MIXED_PRECISION"])
        assert TrainingArguments(str(tmp_path), report_to="none").mixed_precision == precision


def test_eight_physical_cores_are_divided_among_the_processes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, threads in (("cpu", "8"), ("2cpu_ddp", "4"), ("1gpu_t4_fp16", "1"), ("2gpu_ddp", "1")):
        assert launcher_environment(FOLDER / f"{name}.yaml")["OMP_NUM_THREADS"] == threads


def test_max_speed_recipe_under_2cpu_ddp_yaml_is_one_run_of_two_processes_that_sum_over_gloo(tmp_path):
    once = ("--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false")
    cache = ("--embedding_cache_dir", str(tmp_path / "cache"))
    ranks = run_recipe(Launch("2cpu_ddp", "MULTI_CPU", 2), tmp_path, "max_speed.py", *once, *cache)
    assert [rank["rank"] for rank in ranks] == [[0, 0], [1, 1]]
    for rank in ranks:
        assert (rank["kind"], rank["processes"], rank["backend"], rank["summed"]) == ("MULTI_CPU", 2, "gloo", 3.0)
        assert (rank["device"], rank["precision"], rank["steps"]) == ("cpu", "no", 2)
    assert ranks[0]["digest"] == ranks[1]["digest"]  # the same copy, though each read other rows
    results = json.loads((tmp_path / "output" / "all_results.json").read_text())
    assert results["environment"]["num_processes"] == 2
    assert results["environment"]["device"].startswith("cpu")
