"""Steps in host memory on two real processes: the weights of steps on the device, also after one process was killed."""

import pytest
import torch
from locations import HELPERS
from ranks import run_on_ranks
from safetensors.torch import load_file

SCRIPT = HELPERS / "host_on_ranks.py"


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
def test_two_processes_step_on_their_hosts_as_on_their_devices_and_go_on_after_a_kill_on_either(tmp_path):
    folders = {name: tmp_path / name for name in ("device", "host", "killed", "moved")}
    for folder in folders.values():
        folder.mkdir()
    run_on_ranks(SCRIPT, folders["device"], "device")
    run_on_ranks(SCRIPT, folders["host"], "host")
    for name, place in (("killed", "host"), ("moved", "device")):
        run_on_ranks(SCRIPT, folders[name], "host", "killed", is_killed=True)
        assert not (folders[name] / "weights-0.safetensors").exists()
        run_on_ranks(SCRIPT, folders[name], place)
    weights = {(n, r): load_file(f / f"weights-{r}.safetensors") for n, f in folders.items() for r in range(2)}
    assert len(weights) == 8
    assert all(equal(weights["device", 0], others) for others in weights.values())
    changed = {name: tensor + 1e-6 for name, tensor in weights["device", 0].items()}
    assert not equal(changed, weights["device", 0])
