"""Each kind of launch runs a recipe on this CPU: together, split as its file says, to the weights of one process.

Files are launched as they are, but in fp32 (a CPU has no fp16 autocast) and in as few processes as show how they split.
FSDP needs the test-only shim of `cpu_as_gpus`.
"""

import json
from pathlib import Path

import pytest
import torch
from closeness import largest
from launches import ONE_CPU, TWO_CPUS, Launch, run_recipe
from safetensors.torch import load_file

from hf_ext.data import make_demo_encoders, make_demo_table
from hf_ext.optional import installed_version

ON_GPUS = pytest.mark.skipif(torch.accelerator.is_available(), reason="on GPUs: benchmarks/distributed_smoke.py")
FP32 = ("--mixed_precision", "no")
TWO = ("--num_processes", "2", *FP32)
FOUR = ("--num_processes", "4", "--parallelism_config_dp_shard_size", "2", *FP32)
OFFLOAD = ("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")
# `kind` is what accelerate calls it; it calls DDP on the CPU MULTI_CPU.
LAUNCHES = {
    "1gpu_fp16": Launch("1gpu_fp16", "NO", 1, FP32),
    "1gpu_bf16": Launch("1gpu_bf16", "NO", 1, FP32, "frozen"),
    "ddp": Launch("ddp", "MULTI_CPU", 2, TWO),
    "ddp, frozen": Launch("ddp", "MULTI_CPU", 2, TWO, "frozen"),
    "ddp, lora": Launch("ddp", "MULTI_CPU", 2, TWO, "lora"),
    "fsdp2": Launch("fsdp2", "FSDP", 2, TWO),
    "fsdp2, frozen": Launch("fsdp2", "FSDP", 2, TWO, "frozen"),
    "fsdp2, lora": Launch("fsdp2", "FSDP", 2, (*TWO, "--fsdp_state_dict_type", "FULL_STATE_DICT"), "lora"),
    "fsdp2_offload": Launch("fsdp2_offload", "FSDP", 2, TWO),
    "hsdp": Launch("hsdp", "FSDP", 4, FOUR),
    "2node": Launch("2node", "FSDP", 2, TWO, machines=2),
    "fsdp2, no file": Launch("torchrun", "FSDP", 2, ("--fsdp", "full_shard", "--fsdp_config", '{"version": 2}')),
    "zero2": Launch("zero3", "DEEPSPEED", 2, (*TWO, "--zero_stage", "2")),
    "zero3": Launch("zero3", "DEEPSPEED", 2, TWO),
    "zero3, offload": Launch("zero3", "DEEPSPEED", 2, (*TWO, *OFFLOAD)),
}
STEPS = 2
# 8 rows per step whatever the number of processes; precision and dropout as what is compared needs them.
EQUAL = ("--max_steps", str(STEPS), "--effective_batch_size", "8", "--per_device_train_batch_size", "2")
EQUAL += ("--without", "precision")
CASES = {
    "masked_lm": ("mlm.py", *EQUAL),
    "frozen": ("max_speed.py", *EQUAL, "--head_dropout", "0", "--head", "mlp"),  # several processes mix no heads
    "lora": ("max_speed.py", *EQUAL, "--head_dropout", "0", "--use_peft", "true", "--adam_epsilon", "1e-6"),
}
BLOCKS = {"masked_lm": ["EsmLayer"], "frozen": [], "lora": ["BertLayer", "EsmLayer"]}


def demo_words(folder: Path) -> list[str]:
    """Rows and encoders of the demo, without dropout, for which processes draw unlike numbers."""
    make_demo_table(400).to_csv(folder / "rows.csv")
    encoders = [Path(path) for path in make_demo_encoders(folder / "encoders")]
    for path in encoders:
        config = json.loads((path / "config.json").read_text())
        config |= {name: 0.0 for name in config if name.endswith("dropout_prob")}
        (path / "config.json").write_text(json.dumps(config))
    columns = ["--sequence_columns", "heavy", "light", "antigen", "--label_column", "pKd"]
    data = ["--dataset_name", str(folder / "rows.csv"), *columns, "--tower_inputs", "heavy,light", "antigen"]
    return [*data, "--encoders", *map(str, encoders)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a launch of `case`; facts of its processes, and the weights that it saved."""
    folder = tmp_path_factory.mktemp("launched")
    data = demo_words(folder)

    def run(launch: Launch, case: str, name: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
        words = [*CASES[case], "--embedding_cache_dir", str(folder / name / "cache"), *(data if case == "lora" else [])]
        facts = run_recipe(launch, folder / name, *words)
        (path,) = (folder / name / "output").glob("*.safetensors")
        return facts, load_file(path)

    return run


@pytest.fixture(scope="module")
def alone(trained) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of one process, by case."""
    return {case: trained(ONE_CPU, case, f"alone-{case}")[1] for case in CASES}


def check_fsdp(found: dict, launch: Launch) -> None:
    assert found["version"] == 2
    is_whole = launch.case == "lora" or launch.name == "torchrun"
    assert found["state_dict"] == ("FULL_STATE_DICT" if is_whole else "SHARDED_STATE_DICT")
    assert found["offload"] == (launch.name == "fsdp2_offload")
    assert found["reshard"]
    assert [name for name in found["wrapped"] if name.endswith("Layer")] == BLOCKS[launch.case]
    assert found["meshes"] == [[2, 2] if launch.name == "hsdp" else [2]]
    assert found["whole"] == []
    assert found["share"] == pytest.approx(0.5, abs=0.02)


def check_zero(found: dict, launch: Launch) -> None:
    stage = 2 if "--zero_stage" in launch.flags else 3
    assert found["stage"] == stage
    assert found["optimizer"] == ("DeepSpeedZeroOptimizer" if stage == 2 else "DeepSpeedZeroOptimizer_Stage3")
    assert found["offload"] == (["cpu", "cpu"] if set(OFFLOAD) <= set(launch.flags) else ["none", "none"])
    assert found["share"] == pytest.approx(1.0 if stage == 2 else 0.5, abs=0.05)


@pytest.mark.nightly
@ON_GPUS
@pytest.mark.parametrize("name", LAUNCHES)
def test_its_processes_train_together_as_the_file_says_to_the_weights_of_one(name, trained, alone):
    launch = LAUNCHES[name]
    if launch.kind == "DEEPSPEED" and not installed_version("deepspeed"):
        pytest.skip('pip install -e ".[deepspeed]"')
    facts, weights = trained(launch, launch.case, name)
    number = launch.processes
    assert [process["rank"] for process in facts] == [[i, i % (number // launch.machines)] for i in range(number)]
    for process in facts:
        assert process["kind"] == launch.kind
        assert (process["processes"], process["machines"], process["steps"]) == (number, launch.machines, STEPS)
        assert (process["device"], process["precision"]) == ("cpu", "no")
        if number > 1:
            assert (process["backend"], process["summed"]) == ("gloo", number * (number + 1) / 2)
        if launch.kind == "FSDP":
            check_fsdp(process["fsdp"], launch)
        if launch.kind == "DEEPSPEED":
            check_zero(process["zero"], launch)
    assert weights.keys() == alone[launch.case].keys()
    assert largest((weights[key] - value).abs().max() for key, value in alone[launch.case].items()) < 1e-4


@ON_GPUS
def test_a_recipe_on_two_processes_of_the_cpu_is_one_run_that_sums_over_gloo(tmp_path):
    once = ("--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false")
    ranks = run_recipe(TWO_CPUS, tmp_path, "max_speed.py", *once, "--embedding_cache_dir", str(tmp_path / "cache"))
    assert [rank["rank"] for rank in ranks] == [[0, 0], [1, 1]]
    for rank in ranks:
        assert (rank["kind"], rank["processes"], rank["backend"], rank["summed"]) == ("MULTI_CPU", 2, "gloo", 3.0)
        assert (rank["device"], rank["precision"], rank["steps"]) == ("cpu", "no", 2)
    assert ranks[0]["digest"] == ranks[1]["digest"]  # the same copy, though each read other rows
    results = json.loads((tmp_path / "output" / "all_results.json").read_text())
    assert results["environment"]["num_processes"] == 2
    assert results["environment"]["device"].startswith("cpu")
