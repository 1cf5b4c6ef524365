"""The optimizer in host memory: decided for torchao and for FSDP2's files; torchao's equals AdamW and is resumed.

torchao's optimizer needs streams of a GPU. Where there is none, stand-ins that do nothing take their place: copies
between two places in host memory need no order.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from launcher_files import FOLDER, launcher_environment
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.errors import ArgumentError, MissingDependencyError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.optional import import_problem
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, Run, cpu_offload

A100, T4 = describe_hardware("A100"), describe_hardware("T4")
MODEL = ModelFacts(("esm",), num_parameters=100, num_trainable=100, num_encoder_matrices=6)
OFFLOAD = {"optim": "adamw_torch_fused", "optim_ext": "cpu_offload", "max_grad_norm": 0.0}
needs_torchao = pytest.mark.skipif(import_problem("torchao") is not None, reason="needs pip install -e .[torchao]")


def decide(hardware=A100, world_size=1, **given):
    return cpu_offload.decide(Context(hardware, make_args(**{**OFFLOAD, **given}), MODEL, world_size=world_size))


def test_it_is_applied_on_one_cuda_card_and_never_by_all():
    decision = decide()
    assert (decision.status, decision.kind, decision.settings) == ("applied", "I", {"by": "torchao"})
    assert decide(gradient_accumulation_steps=4).status == "applied"  # gradients stay on the card until the step
    assert decide(optim_ext=None, speedups=["all"]).status == "off"
    assert decide(optim_ext=None, speedups=["cpu_offload"]).status == "skipped"
    assert decide(optim_ext="muon").status == "off"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_grad_norm": 1.0}, "add --max_grad_norm 0 (now 1)"),
        ({"nan_policy": "skip"}, "use --nan_policy stop"),
        ({"hardware": T4, "speedups": ["all"]}, "before fp16's loss scale is taken off"),
        ({"hardware": describe_hardware("cpu")}, "for one CUDA card; on cpu there is nothing to gain"),
        ({"world_size": 2}, "use accelerate_configs/4gpu_fsdp2_offload.yaml"),
        ({"optim": "adafactor"}, "--optim adafactor was asked for"),
        ({"without": ["cpu_offload"]}, "contradict each other"),
    ],
)
def test_what_it_would_get_wrong_is_refused_with_the_alternative(given, says):
    decision = decide(**given)
    assert decision.status == "refused"
    assert says in decision.reason


def test_a_t4_that_trains_in_float32_may_use_it():
    assert decide(T4, speedups=["all"], without=["precision"]).status == "applied"


def test_sharding_offloads_by_its_own_switch(monkeypatch):
    args = make_args(**OFFLOAD)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    assert "4gpu_zero3_offload.yaml" in cpu_offload.decide(Context(A100, args, MODEL)).reason
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "4gpu_fsdp2_offload.yaml" in decide().reason


def test_the_defaults_of_a_run_are_refused_before_anything_starts(tmp_path):
    args = {**OFFLOAD, "max_grad_norm": 1.0}
    plan = make_plan(make_args(tmp_path, **args), make_wide_esm(), hardware=A100)
    with pytest.raises(PlanRefused, match="cpu_offload: gradients reach the host before they are clipped"):
        make_trainer(tmp_path, plan=plan, **args)


@pytest.mark.skipif(import_problem("torchao") is None, reason="torchao is installed")
def test_without_torchao_the_run_stops_with_the_command_that_brings_it():
    with pytest.raises(MissingDependencyError, match=r"optim_ext cpu_offload.*hf_ext\[torchao\]"):
        cpu_offload.apply(decide(), Run(make_args(**OFFLOAD), make_wide_esm()))


# --- FSDP2's own ------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Puts the environment in place that `accelerate launch --config_file` gives, but for the devices."""

    def launch(name: str) -> None:
        for key, value in launcher_environment(FOLDER / f"{name}.yaml").items():
            if key.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
                monkeypatch.setenv(key, value)

    return launch


def test_the_offload_file_is_in_the_plan_and_fused_adamw_with_it(launched):
    launched("4gpu_fsdp2_offload")
    given = {"speedups": ["all"], "optim": "adamw_torch_fused"}
    plan = make_plan(make_args(**given), make_wide_esm(), make_rows(), pad_rows, hardware=A100)
    assert plan["cpu_offload"].status == "applied"
    assert plan["cpu_offload"].settings == {"by": "fsdp"}
    assert (
        plan["cpu_offload"].reason == "FSDP2 keeps weights, gradients and the states of adamw_torch_fused on the host"
    )
    assert plan.applied("fused_optimizer")
    assert cpu_offload.apply(plan["cpu_offload"], Run(None, None)) == plan["cpu_offload"]


def test_the_other_fsdp_files_do_not_offload(launched):
    launched("4gpu_fsdp2")
    assert decide(optim_ext=None).status == "off"


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_optimizers_of_gpu_kernels_are_refused_beside_fsdps_offload(launched, optim):
    launched("4gpu_fsdp2_offload")
    decision = decide(optim_ext=None, optim=optim)
    assert decision.status == "refused"
    assert "use --optim adamw_torch_fused" in decision.reason


def test_fsdp_of_trainers_own_arguments_is_seen_too():
    args = make_args(optim="adamw_torch_fused")
    args.fsdp_plugin_args = {"fsdp_version": 2, "cpu_offload": True}
    assert cpu_offload.decide(Context(A100, args, MODEL)).settings == {"by": "fsdp"}
    args.fsdp_plugin_args = {"fsdp_version": 2}
    assert cpu_offload.decide(Context(A100, args, MODEL)).status == "off"


# --- torchao's, carried out ------------------------------------------------------------------------------------------


class NoStream:
    """A CUDA stream that orders nothing."""

    def wait_stream(self, other): ...

    def synchronize(self): ...

    def record_event(self):
        return self


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams and pinned memory, or stand-ins without a GPU."""
    if torch.cuda.is_available():
        return
    offloading = pytest.importorskip("torchao.optim.cpu_offload")
    empty_like = torch.empty_like
    monkeypatch.setattr(offloading, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs))


def make_pair_member(folder, **given):
    """A trainer whose matrices (128 wide) move to the host and whose vectors stay."""
    cuda = {"use_cpu": not torch.cuda.is_available()}
    given = {**OFFLOAD, "learning_rate": 1e-3, "weight_decay": 0.1, **cuda, **given}
    model = make_wide_esm(hidden_size=128, intermediate_size=128)
    plan = make_plan(make_args(folder, **given), model, make_rows(), pad_rows, hardware=A100)
    return make_trainer(folder, model, plan=plan, **given)


@needs_torchao
@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_on_the_host_equal_steps_on_the_card_under_a_schedule(streams, tmp_path, accumulation):
    given = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4 // accumulation}
    plain = make_pair_member(tmp_path / "plain", optim_ext=None, **given)
    ours = make_pair_member(tmp_path / "ours", **given)
    broken = make_pair_member(tmp_path / "broken", weight_decay=0.2, **given)
    for trainer in (plain, ours, broken):
        trainer.train()
    inner = ours.optimizer.optimizer
    assert type(inner).__name__ == "CPUOffloadOptimizer"
    assert len(inner.param_d2h_map) == 14
    assert inner.d_opt is not None  # small ones on the card, where the schedule must reach them as well
    tolerance = 1e-5 if torch.cuda.is_available() else 0.0
    assert largest_weight_difference(plain.model, ours.model) <= tolerance
    assert largest_weight_difference(plain.model, broken.model) > 1e-5
    assert ours.plan["cpu_offload"].evidence["device_bytes_saved"] == 8 * sum(
        p.numel() for p in ours.model.parameters() if p.requires_grad
    )


@needs_torchao
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_in_the_middle(streams, tmp_path):
    whole = make_pair_member(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make_pair_member(tmp_path / "resumed", seed=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert whole.state.global_step == resumed.state.global_step == 4
    assert largest_weight_difference(whole.model, resumed.model) == 0.0


@needs_torchao
def test_weights_loaded_between_two_trainings_are_not_overwritten_by_the_hosts(streams, tmp_path):
    ours = make_pair_member(tmp_path / "ours", max_steps=1, learning_rate=0.0)
    ours.train()
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.fill_(0.5)
    ours.train()
    assert all(bool((p == 0.5).all()) for p in ours.model.parameters())


@needs_torchao
def test_an_optimizer_of_the_callers_own_is_not_replaced_in_silence(streams, tmp_path):
    trainer = make_pair_member(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"--optim_ext cpu_offload: the trainer was given an optimizer \(SGD\)"):
        trainer.train()
