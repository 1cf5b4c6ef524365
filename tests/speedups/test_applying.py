"""What applied decisions do to a run, and that it is undone afterwards."""

import pytest
import torch

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.speedups import CpuMatmul, Decision, Run, Tf32, encoder_precision
from hf_ext.training_args import FastTrainingArguments


def make_args(**given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir="o", **{"use_cpu": True, **given})


# --- process-wide settings -------------------------------------------------------------------------------------------


def apply_cpu_matmul() -> tuple[Decision, Run]:
    run = Run(make_args(), None)
    return CpuMatmul.apply(Decision("cpu_matmul", "N", "applied", "try"), run), run


def test_cpu_matmul_reports_its_error_and_puts_the_setting_back(torch_settings, monkeypatch):
    monkeypatch.setattr("hf_ext.speedups.precision.MAX_ERROR", 1.0)
    before = torch_settings()
    decision, run = apply_cpu_matmul()
    assert decision.status == "applied"
    assert decision.evidence["relative_error"] < 1e-2
    assert torch_settings()["matmul"].on_cpu == "bf16"  # and the general query, inside it, does not raise
    run.restore()
    assert torch_settings() == before
    run.restore()
    assert torch_settings() == before


def test_cpu_matmul_switches_back_at_once_where_it_rounds(torch_settings, monkeypatch):
    monkeypatch.setattr("hf_ext.speedups.precision.MAX_ERROR", 0.0)
    before = torch_settings()
    decision, run = apply_cpu_matmul()
    assert decision.status == "skipped"
    assert decision.reason.startswith("would round to bf16")
    assert set(decision.evidence) == {"relative_error"}
    assert torch_settings() == before
    run.restore()
    assert torch_settings() == before


def test_tf32_is_switched_where_transformers_has_used_torchs_other_setting(torch_settings, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    args = make_args(torch_compile=True)  # sets torch.backends.fp32_precision, as it would on an A100
    before = torch_settings()
    assert before["general"] == "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    run = Run(args, None)
    Tf32.apply(Decision("tf32", "N", "applied", "A100 has TF32"), run)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "high"  # others may read it, torch's compiler does
    run.restore()
    assert torch_settings() == before


# --- Trainer's own fields --------------------------------------------------------------------------------------------


def test_applied_settings_land_in_the_fields_that_trainer_reads(demo_rows, make_affinity):
    model, collator = make_affinity("lora", "lora")
    args = FastTrainingArguments(
        output_dir="o",
        speedups=["all"],
        without=["tf32", "compile"],
        per_device_train_batch_size=4,
        effective_batch_size=16,
    )
    plan = make_plan(args, model, demo_rows, collator, describe_hardware("A100"))
    plan.apply(Run(args, model, collator, demo_rows))
    assert (args.bf16, args.fp16, args.mixed_precision) == (True, False, "bf16")
    assert args.gradient_accumulation_steps == 4
    assert args.accelerator_config.non_blocking is True
    assert args.dataloader_pin_memory is True
    assert args.train_sampling_strategy in ("random", "group_by_length")


# --- encoder precision -----------------------------------------------------------------------------------------------


def test_rounding_noise_is_measured_against_the_spread_between_sequences():
    reference = torch.tensor([[0.0, 0.0], [2.0, 0.0]])  # centred: 1 from the centre each
    shifted = reference + 5  # a common offset changes no difference between sequences
    assert encoder_precision.relative_noise(shifted, reference) == 0
    noisy = torch.tensor([[0.0, 0.5], [2.0, -0.5]])
    assert encoder_precision.relative_noise(noisy, reference) == pytest.approx(0.5)
    assert encoder_precision.relative_noise(reference[:1], reference[:1]) == 0


@pytest.fixture
def bf16_run(demo_rows, make_affinity):
    """Applies encoder_precision for described hardware; returns decision, model and float32 reference embeddings."""

    def apply(hardware: str, max_noise: float, **settings):
        model, collator = make_affinity(**settings)
        args = make_args(speedups=["encoder_precision"])
        batch = collator.encode("antigen", [demo_rows["antigen"][0]])
        reference = model.encode("antigen", batch)
        plan = make_plan(args, model, demo_rows, collator, describe_hardware(hardware))
        plan["encoder_precision"].settings["max_noise"] = max_noise
        plan.apply(Run(args, model, collator, demo_rows))
        return plan["encoder_precision"], model, reference, model.encode("antigen", batch)

    return apply


@pytest.mark.parametrize(
    ("hardware", "dtype", "autocast", "stored"),
    [("cpu-avx512-bf16", "float32", "bfloat16", torch.float32), ("A100", "bfloat16", None, torch.bfloat16)],
)
def test_half_precision_encoders_differ_from_float32_by_no_more_than_their_rounding(
    bf16_run, hardware, dtype, autocast, stored
):
    decision, model, reference, half = bf16_run(hardware, max_noise=1.0)
    assert decision.status == "applied"
    assert set(decision.evidence["noise_share"]) == {"heavy", "light", "antigen"}
    assert all(0 < share < 0.2 for share in decision.evidence["noise_share"].values())
    assert (model.config.encoder_dtype, model.config.encoder_autocast) == (dtype, autocast)
    assert {p.dtype for p in model.encoders.parameters()} == {stored}
    assert {p.dtype for p in model.head.parameters()} == {torch.float32}
    assert half.dtype == torch.float32
    assert 0 < (half - reference).norm() / reference.norm() < 0.02


@pytest.mark.parametrize("hardware", ["cpu-avx512-bf16", "A100"])
def test_encoders_whose_rounding_exceeds_the_bound_stay_in_float32_with_the_evidence(bf16_run, hardware):
    decision, model, reference, after = bf16_run(hardware, max_noise=1e-6)
    assert decision.status == "skipped"
    assert "of the spread between sequences" in decision.reason
    assert decision.evidence["bound"] == 1e-6
    assert min(decision.evidence["noise_share"].values()) > 1e-6
    assert (model.config.encoder_dtype, model.config.encoder_autocast) == ("float32", None)
    assert torch.equal(after, reference)
