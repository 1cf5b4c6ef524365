"""Every launcher file runs a recipe on this CPU: in as many processes as it should, split as it says, to the same end.

The files are launched as they are, but for the flags of `REASONS`. FSDP needs the test-only shim of `cpu_as_gpus`.
"""

import json
from pathlib import Path

import pytest
import torch
from closeness import largest
from launcher_files import FOLDER
from launches import Launch, run_recipe
from safetensors.torch import load_file

from hf_ext.data.demo import make_demo_encoders, make_demo_table
from hf_ext.optional import installed_version

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="on GPUs: benchmarks/distributed_smoke.py"),
]

# Flags that differ from the file, and why.
REASONS = {
    "--mixed_precision": "fp32, because a CPU has no fp16 autocast and weights are to agree within 1e-4",
    "--num_processes": "this machine has two cores; as many processes as show how the file splits",
    "--parallelism_config_dp_shard_size": "two groups of two instead of two groups of four",
}
FP32 = ("--mixed_precision", "no")
TWO = ("--num_processes", "2", *FP32)
FOUR = ("--num_processes", "4", "--parallelism_config_dp_shard_size", "2", *FP32)
# `kind` is what accelerate calls it; it calls DDP on the CPU MULTI_CPU.
LAUNCHES = [
    Launch("cpu", "NO", 1),
    Launch("2cpu_ddp", "MULTI_CPU", 2),
    Launch("1gpu_t4_fp16", "NO", 1, FP32),
    Launch("1gpu_a100_bf16", "NO", 1, FP32, "frozen"),
    Launch("1gpu_h100_bf16", "NO", 1, FP32),
    Launch("2gpu_baseline", "MULTI_CPU", 2, FP32),
    Launch("4gpu_baseline", "MULTI_CPU", 2, TWO),
    Launch("2gpu_ddp", "MULTI_CPU", 2, FP32),
    Launch("4gpu_ddp", "MULTI_CPU", 2, TWO, "lora"),
    Launch("8gpu_ddp", "MULTI_CPU", 2, TWO, "frozen"),
    Launch("2gpu_fsdp2", "FSDP", 2, FP32),
    Launch("4gpu_fsdp2", "FSDP", 2, TWO, "frozen"),
    Launch("8gpu_fsdp2", "FSDP", 2, TWO),
    Launch("4gpu_fsdp2_offload", "FSDP", 2, TWO),
    Launch("4gpu_fsdp2_lora", "FSDP", 2, TWO, "lora"),
    Launch("8gpu_hsdp", "FSDP", 4, FOUR),
    Launch("2node_8gpu_fsdp2", "FSDP", 2, TWO, machines=2),
    Launch("4gpu_zero2", "DEEPSPEED", 2, TWO),
    Launch("4gpu_zero3_offload", "DEEPSPEED", 2, TWO),
]
STEPS = 2
# 8 rows per step whatever the number of processes; precision and dropout as what is compared needs them.
EQUAL = ("--max_steps", str(STEPS), "--effective_batch_size", "8", "--per_device_train_batch_size", "2")
EQUAL += ("--without", "precision")
CASES = {
    "masked_lm": ("mlm.py", *EQUAL),
    "frozen": ("max_speed.py", *EQUAL, "--head_dropout", "0"),
    "lora": ("max_speed.py", *EQUAL, "--head_dropout", "0", "--use_peft", "true", "--adam_epsilon", "1e-6"),
}
NEEDS_DEEPSPEED = pytest.mark.skipif(not installed_version("deepspeed"), reason='pip install -e ".[deepspeed]"')
PARAMETERS = [
    pytest.param(launch, id=launch.name, marks=NEEDS_DEEPSPEED if "zero" in launch.name else ()) for launch in LAUNCHES
]


def write_without_dropout(folder: Path) -> list[str]:
    """The demo encoders, as encoders that train need them where processes draw unlike numbers."""
    paths = [Path(path) for path in make_demo_encoders(folder)]
    for path in paths:
        config = json.loads((path / "config.json").read_text())
        config |= {name: 0.0 for name in config if name.endswith("dropout_prob")}
        (path / "config.json").write_text(json.dumps(config))
    return [str(path) for path in paths]


class Runs:
    """Runs each launch once; a failed one fails again without another try."""

    def __init__(self, folder):
        self.folder, self.cache = folder, {}
        make_demo_table(400).to_csv(folder / "rows.csv")
        encoders = [*write_without_dropout(folder / "encoders")]
        columns = ["--sequence_columns", "heavy", "light", "antigen", "--label_column", "pKd"]
        self.data = ["--dataset_name", str(folder / "rows.csv"), *columns]
        self.data += ["--encoders", *encoders, "--tower_inputs", "heavy,light", "antigen"]

    def __call__(self, launch: Launch):
        """The facts of each process, and the folder of the trained model."""
        place = self.folder / f"{launch.name}-{launch.case}"
        if launch not in self.cache:
            self.cache[launch] = AssertionError(f"{launch.name} failed before")
            arguments = [*CASES[launch.case], "--embedding_cache_dir", str(place / "cache")]
            arguments += self.data if launch.case == "lora" else []
            self.cache[launch] = run_recipe(launch, place, *arguments)
        if isinstance(self.cache[launch], AssertionError):
            raise self.cache[launch]
        return self.cache[launch], place / "output"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("launched"))


def test_each_of_nineteen_files_has_a_launch_and_each_flag_a_reason():
    names = [launch.name for launch in LAUNCHES]
    assert sorted(names) == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert len(names) == 19
    flags = {flag for launch in LAUNCHES for flag in launch.flags if flag.startswith("--")}
    assert flags == REASONS.keys()
    assert {launch.case for launch in LAUNCHES} == CASES.keys()


@pytest.mark.parametrize("launch", PARAMETERS)
def test_its_processes_train_together(launch, runs):
    facts, _ = runs(launch)
    number = launch.processes
    assert [process["rank"][0] for process in facts] == list(range(number))
    assert [process["rank"][1] for process in facts] == [rank % (number // launch.machines) for rank in range(number)]
    for process in facts:
        assert process["kind"] == launch.kind
        assert (process["processes"], process["machines"], process["steps"]) == (number, launch.machines, STEPS)
        assert (process["device"], process["precision"]) == ("cpu", "no")
        if number > 1:
            assert (process["backend"], process["summed"]) == ("gloo", number * (number + 1) / 2)


WHOLE, HALF = 1.0, 0.5
BLOCKS = {"masked_lm": ["EsmLayer"], "frozen": [], "lora": ["BertLayer", "EsmLayer"]}


@pytest.mark.parametrize("launch", [launch for launch in PARAMETERS if launch.values[0].kind == "FSDP"])
def test_fsdp_splits_every_weight_in_two_layer_by_layer(launch, runs):
    for process in runs(launch)[0]:
        fsdp = process["fsdp"]
        assert fsdp["version"] == 2
        assert fsdp["state_dict"] == ("FULL_STATE_DICT" if "lora" in launch.name else "SHARDED_STATE_DICT")
        assert fsdp["offload"] == ("offload" in launch.name)
        assert fsdp["reshard"]
        assert [name for name in fsdp["wrapped"] if name.endswith("Layer")] == BLOCKS[launch.case]
        assert fsdp["meshes"] == [[2, 2] if launch.name == "8gpu_hsdp" else [2]]
        assert fsdp["whole"] == []
        assert fsdp["share"] == pytest.approx(HALF, abs=0.02)


@pytest.mark.parametrize(
    ("launch", "stage", "optimizer", "offload", "share"),
    [
        pytest.param(*PARAMETERS[-2].values, 2, "DeepSpeedZeroOptimizer", ["none", "none"], WHOLE),
        pytest.param(*PARAMETERS[-1].values, 3, "DeepSpeedZeroOptimizer_Stage3", ["cpu", "cpu"], HALF),
    ],
    ids=["4gpu_zero2", "4gpu_zero3_offload"],
)
@NEEDS_DEEPSPEED
def test_zero_runs_its_stage_with_its_optimizer(launch, stage, optimizer, offload, share, runs):
    for process in runs(launch)[0]:
        zero = process["zero"]
        assert (zero["stage"], zero["optimizer"], zero["offload"]) == (stage, optimizer, offload)
        assert zero["share"] == pytest.approx(share, abs=0.05)


def weights(folder) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return largest((ours[name].float() - theirs[name].float()).abs().max() for name in ours)


@pytest.mark.parametrize("launch", PARAMETERS)
def test_the_saved_model_is_that_of_one_process(launch, runs):
    alone = weights(runs(Launch("cpu", "NO", 1, case=launch.case))[1])
    assert largest_difference(weights(runs(launch)[1]), alone) < 1e-4
