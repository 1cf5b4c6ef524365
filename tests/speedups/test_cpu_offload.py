"""The optimizer in host memory: decided for ours and FSDP2's files; ours equals the card's in any run, and resumes.

Plans are made for a described card and carried out on the CPU, where host and device are two places in one memory and
numbers are equal to the bit; two tests need a real card.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from launcher_files import FOLDER, launcher_environment
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.errors import ArgumentError, CheckpointError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.host_optimizer import HostOptimizer, find_host_optimizer, move_to_host
from hf_ext.parser import FastArgumentParser
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, Run, cpu_offload, muon
from hf_ext.training_args import FastTrainingArguments

A100, T4 = describe_hardware("A100"), describe_hardware("T4")
MODEL = ModelFacts(("esm",), num_parameters=100, num_trainable=100, num_block_matrices=6)
OFFLOAD = {"optim": "adamw_torch_fused", "optim_ext": "cpu_offload"}
BOTH = ["muon", "cpu_offload"]


def decide(hardware=A100, world_size=1, **given):
    return cpu_offload.decide(Context(hardware, make_args(**{**OFFLOAD, **given}), MODEL, world_size=world_size))


def test_it_is_applied_on_cards_on_request_and_never_by_all():
    decision = decide()
    assert (decision.status, decision.kind, decision.settings) == ("applied", "I", {"by": "host"})
    assert decision.reason == "adamw_torch_fused steps in host memory: its states leave A100-40GB"
    for given in ({"gradient_accumulation_steps": 4}, {"max_grad_norm": 1.0}, {"nan_policy": "skip"}, {"fp16": True}):
        assert decide(**given).status == "applied"  # it steps on what the step would have seen
    assert decide(T4, speedups=["all"]).status == "applied"  # float16 with a loss scale
    assert decide(optim_ext=None, speedups=["all"]).status == "off"
    assert decide(optim_ext=None, speedups=["cpu_offload"]).status == "skipped"
    assert decide(optim_ext="muon").status == "off"


def test_beside_muon_and_on_several_processes_the_plan_says_what_that_costs():
    assert "Muon and AdamW step in host memory: their states leave" in decide(optim_ext=BOTH).reason
    assert "matrix products are slow on a CPU" in decide(optim_ext=BOTH).reason
    assert muon.decide(Context(A100, make_args(**{**OFFLOAD, "optim_ext": BOTH}), MODEL)).status == "applied"
    assert decide(world_size=4).reason.endswith("each of 4 processes keeps all states there")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hardware": describe_hardware("cpu")}, "for cards with memory of their own; on cpu there is nothing to gain"),
        ({"optim": "sgd"}, "keeps at most momentum, too little to move"),
        ({"optim": "adamw_bnb_8bit"}, "--optim adamw_bnb_8bit was not tried in host memory: use --optim adamw_torch"),
        ({"optim": "adamw_torch_8bit"}, "was not tried in host memory"),
        ({"without": ["cpu_offload"]}, "contradict each other"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_alternative(given, says):
    decision = decide(**given)
    assert decision.status == "refused"
    assert says in decision.reason


def test_sharding_offloads_by_its_own_switch(monkeypatch):
    args = make_args(**OFFLOAD)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    assert "4gpu_zero3_offload.yaml" in cpu_offload.decide(Context(A100, args, MODEL)).reason
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "4gpu_fsdp2_offload.yaml" in decide().reason


def test_on_this_machine_without_a_card_it_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(PlanRefused, match="cpu_offload: for cards with memory of their own"):
        make_trainer(tmp_path, **OFFLOAD)


@pytest.mark.parametrize(
    ("words", "means"),
    [(["muon", "cpu_offload"], BOTH), (["cpu_offload"], ["cpu_offload"]), (["muon"], ["muon"])],
)
def test_command_line_yaml_and_python_take_one_word_or_both(tmp_path, words, means):
    def parse(*given):
        command = ["--output_dir", str(tmp_path), "--use_cpu", "true", *given]
        return FastArgumentParser(FastTrainingArguments).parse_args_into_dataclasses(command)[0].optim_ext

    yaml = tmp_path / "c.yaml"
    assert parse("--optim_ext", *words) == make_args(optim_ext=words).optim_ext == means
    yaml.write_text(f"optim_ext: [{', '.join(words)}]\n")
    assert parse("--config", str(yaml)) == means
    if len(words) == 1:  # as it was written before there were two
        yaml.write_text(f"optim_ext: {words[0]}\n")
        assert parse("--config", str(yaml)) == make_args(optim_ext=words[0]).optim_ext == means


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


# --- carried out -----------------------------------------------------------------------------------------------------


def make_member(folder, model=None, hardware=A100, **given):
    """A trainer of a pair that differs in nothing but where its optimizer steps."""
    given = {**OFFLOAD, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, **given}
    model = make_wide_esm() if model is None else model
    plan = make_plan(make_args(folder, **given), model, make_rows(), pad_rows, hardware=hardware)
    return make_trainer(folder, model, plan=plan, **given)


KINDS = {
    "adamw": ({}, None),
    "accumulation": ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, None),
    "muon": ({"optim_ext": BOTH}, "muon"),
    "adafactor": ({"optim": "adafactor"}, None),
    "rates": ({"encoder_learning_rate": 1e-4}, None),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_steps_are_on_the_host_equals_the_cards(tmp_path, kind):
    given, without = KINDS[kind]
    plain = make_member(tmp_path / "plain", **{**given, "optim_ext": without})
    ours = make_member(tmp_path / "ours", **given)
    broken = make_member(tmp_path / "broken", **given, max_grad_norm=0.0)  # as if the host saw gradients too early
    for trainer in (plain, ours, broken):
        trainer.train()
    assert find_host_optimizer(plain.optimizer) is None  # off means untouched
    assert find_host_optimizer(ours.optimizer).times.num_steps == 4
    assert largest_weight_difference(plain.model, ours.model) == 0.0
    assert largest_weight_difference(plain.model, broken.model) > 1e-5 or kind == "adafactor"  # which clips by itself
    assert [log.get("loss") for log in plain.state.log_history] == [log.get("loss") for log in ours.state.log_history]


def test_the_plan_says_what_left_the_card_and_what_it_took(tmp_path):
    trainer = make_member(tmp_path, max_steps=6)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    num = sum(p.numel() for p in trained)
    assert trainer.plan["cpu_offload"].evidence == {"pinned_bytes": 8 * num}
    trainer.train()
    evidence = trainer.plan["cpu_offload"].evidence
    stepped = [p for p in trained if p in find_host_optimizer(trainer.optimizer).state]  # the contact head is not
    assert evidence["device_bytes_saved"] == 8 * sum(p.numel() for p in stepped) + 4 * len(stepped)
    assert 0 < evidence["copy_s"] + evidence["host_step_s"] < 1
    assert 0 < evidence["share_of_step"] < 1


def test_a_step_that_nan_policy_leaves_out_is_left_out_on_the_host_too(tmp_path, monkeypatch):
    def run(folder, **given):
        trainer = make_member(tmp_path / folder, nan_policy="skip", **given)
        compute = trainer.compute_loss
        bad = lambda *args, **kwargs: compute(*args, **kwargs) * (float("nan") if trainer.state.global_step == 1 else 1)  # noqa: E731
        monkeypatch.setattr(trainer, "compute_loss", bad)
        trainer.train()
        return trainer

    plain, ours = run("plain", optim_ext=None), run("ours")
    assert largest_weight_difference(plain.model, ours.model) == 0.0
    assert ours.model.lm_head.bias.isfinite().all()


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{}, {"optim_ext": BOTH}], ids=["adamw", "muon"])
def test_a_run_goes_on_bit_for_bit_with_the_offload_and_without(tmp_path, given):
    whole = make_member(tmp_path / "whole", save_strategy="steps", save_steps=2, **given)
    whole.train()
    without = [word for word in given.get("optim_ext", []) if word != "cpu_offload"] or None
    for folder, optim_ext in (("host", given.get("optim_ext", "cpu_offload")), ("card", without)):
        resumed = make_member(tmp_path / folder, seed=3, optim_ext=optim_ext)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert (find_host_optimizer(resumed.optimizer) is None) == (folder == "card")
        assert resumed.state.global_step == 4
        assert largest_weight_difference(whole.model, resumed.model) == 0.0


def test_a_run_of_the_card_goes_on_on_the_host_but_not_with_muon_unasked(tmp_path):
    whole = make_member(tmp_path / "whole", optim_ext=None, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make_member(tmp_path / "host")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert largest_weight_difference(whole.model, resumed.model) == 0.0
    with pytest.raises(CheckpointError, match="optim_ext"):
        make_member(tmp_path / "muon", optim_ext=BOTH).train(str(tmp_path / "whole" / "checkpoint-2"))


def test_a_run_moves_to_the_host_between_two_steps(tmp_path):
    plain = make_member(tmp_path / "plain", optim_ext=None)
    plain.train()
    moved = make_member(tmp_path / "moved", optim_ext=None)
    step_ended = moved.callback_handler.on_step_end

    def move_after_two(args, state, control):
        if state.global_step == 2:
            assert move_to_host(moved.optimizer) is moved.optimizer
        return step_ended(args, state, control)

    moved.callback_handler.on_step_end = move_after_two
    moved.train()
    assert find_host_optimizer(moved.optimizer).times.num_steps == 2
    assert largest_weight_difference(plain.model, moved.model) == 0.0
    assert moved.plan["cpu_offload"].evidence["device_bytes_saved"] > 0


@pytest.mark.nightly
def test_steps_that_take_more_than_a_tenth_are_warned_of_once_with_what_helps(tmp_path, caplog):
    class Slow(HostOptimizer):
        share = 1.0

        def step(self, closure=None):
            super().step(closure)
            self.times.step_s += self.share

    def warnings_at(folder, share):
        trainer = make_member(tmp_path / folder, optim_ext=None, max_steps=16)
        slow = Slow(torch.optim.AdamW(trainer.model.parameters(), lr=1e-3))
        slow.share, trainer.optimizer = share, slow
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer.train()
        return [r.getMessage() for r in caplog.records if "Steps in host memory take" in r.getMessage()]

    (warning,) = warnings_at("slow", 1.0)
    assert "--gradient_accumulation_steps" in warning
    assert warnings_at("fast", -10.0) == []


def test_weights_changed_between_two_trainings_are_what_the_second_starts_from(tmp_path):
    ours = make_member(tmp_path, max_steps=1, learning_rate=0.0)
    ours.train()
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.fill_(0.5)
    first = find_host_optimizer(ours.optimizer)
    ours.train()
    assert find_host_optimizer(ours.optimizer) is first
    assert all(bool((p == 0.5).all()) for p in ours.model.parameters())


def test_an_optimizer_of_the_callers_own_steps_on_the_host_and_a_foreign_one_is_refused(tmp_path):
    trainer = make_member(tmp_path)
    trainer.optimizer = own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert find_host_optimizer(trainer.optimizer).wrapped is own
    trainer.optimizer = type("Lion8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim"})(own.param_groups)
    with pytest.raises(ArgumentError, match=r"Lion8bit \(bitsandbytes\)"):
        trainer.train()


@pytest.mark.gpu
def test_on_a_card_the_states_leave_it_and_the_peak_does_not_grow():
    torch.cuda.empty_cache()
    weight = torch.nn.Parameter(torch.zeros(2**24, device="cuda"))  # 64 MiB
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moved = move_to_host(optimizer)
    assert before - torch.cuda.memory_allocated() >= 2 * weight.nbytes
    after = torch.cuda.memory_allocated()
    moved.step()
    assert torch.cuda.max_memory_allocated() <= before
    assert torch.cuda.memory_allocated() == after
    assert weight.is_cuda
    twin = torch.nn.Parameter(torch.zeros(2**24, device="cuda"))
    twin.grad = torch.ones_like(twin)
    plain = torch.optim.AdamW([twin], fused=True)
    plain.step()
    plain.step()
    assert torch.allclose(weight, twin, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("optim_ext", ["cpu_offload", BOTH])
def test_on_a_card_a_run_learns_what_it_learns_with_its_states_there(tmp_path, optim_ext):
    given = {"use_cpu": False, "max_steps": 10}
    plain = make_member(tmp_path / "plain", **given, optim_ext=[w for w in optim_ext if w == "muon"] or None)
    ours = make_member(tmp_path / "ours", **given, optim_ext=optim_ext)
    for trainer in (plain, ours):
        trainer.train()
    pairs = zip(plain.state.log_history[:10], ours.state.log_history[:10], strict=True)
    assert all(abs(one["loss"] - other["loss"]) < 1e-2 for one, other in pairs)
    assert ours.plan["cpu_offload"].evidence["device_bytes_saved"] > 0
    assert {p.device.type for p in ours.model.parameters()} == {"cuda"}
    states = find_host_optimizer(ours.optimizer).state.values()
    assert {value.device.type for values in states for value in values.values()} == {"cpu"}
