"""The table of accelerate_configs/README.md is what its generator writes, and the generator's sums are right."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "accelerate_configs"
README = (FOLDER / "README.md").read_text(encoding="ascii")


@pytest.fixture(scope="module")
def config_table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import config_table
    finally:
        sys.path.pop(0)
    return config_table


def test_the_readme_holds_the_generated_table_with_a_row_for_each_of_nineteen_files(config_table):
    assert config_table.render(README) == README
    assert config_table.render(README.replace("12.0 / 12.6", "1.0 / 1.0")) == README  # edited by hand: put right
    rows = [line for line in README.splitlines() if line.startswith("| [`")]
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert {row.split("`")[1] for row in rows} == files
    assert len(rows) == len(files) == 19


@pytest.mark.parametrize(
    ("name", "half", "full", "host"),
    [
        # A million parameters in ten layers: bytes in bf16, in fp32, and on the host of an offloading file.
        ("cpu", 18e6, 16e6, 0),
        ("4gpu_ddp", 22e6, 20e6, 0),
        ("4gpu_fsdp2", 4e6 + 1e6, 4e6 + 1.6e6, 0),
        ("8gpu_hsdp", 4e6 + 1e6, 4e6 + 1.6e6, 0),
        ("4gpu_fsdp2_offload", 1e6, 1.6e6, 16e6),
        ("4gpu_zero2", 2e6 + 4.5e6, 4e6 + 5e6, 0),
        ("4gpu_zero3_offload", 2e6 + 0.4e6, 4e6 + 0.8e6, 27e6),
    ],
)
def test_bytes_of_a_million_parameters(config_table, name, half, full, host):
    class Million:
        num_parameters, num_layers = 10**6, 10

    config = config_table.read_config(FOLDER / f"{name}.yaml")
    assert config_table.device_bytes(config, Million, True) == pytest.approx(half)
    assert config_table.device_bytes(config, Million, False) == pytest.approx(full)
    assert config_table.host_bytes(config, Million) == host


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("4gpu_ddp", 6e6),  # 2 x 3/4 x 4
        ("4gpu_fsdp2", 6e6),  # 2 x 3/4 x 2 and 3/4 x 4
        ("4gpu_fsdp2_lora", 3e6),  # 2 x 3/4 x 2
        ("8gpu_hsdp", 7e6),  # 2 x 3/4 x 2, 3/4 x 4 and 2 x 1/2 x 4 / 4
        ("4gpu_zero3_offload", 4.5e6),  # 3 x 3/4 x 2
    ],
)
def test_bytes_sent_of_a_million_parameters(config_table, name, num_bytes):
    class Million:
        num_parameters, num_layers = 10**6, 10

    config = config_table.read_config(FOLDER / f"{name}.yaml")
    assert sum(part[2] for part in config_table.sent(config, Million)) == pytest.approx(num_bytes)
