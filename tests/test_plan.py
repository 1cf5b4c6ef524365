"""The plan: an entry per speed-up, refusals before anything changes, settings switched back; launched processes."""

import json

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from inside import DataFacts
from miniature_esm import make_esm
from tiny_generators import TINY, make_on_encoder

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models import LoraSettings, read_encoder
from hf_ext.processes import check_fsdp, check_parallelism, check_together, need_cpu_backend
from hf_ext.speedups import REGISTRY, Context, describe_model, find_speedup
from hf_ext.speedups.evidence.facts import padding_share
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NAMES = [speedup.NAME for speedup in REGISTRY]


def make_args(folder="o", **given) -> FastTrainingArguments:
    settings = {"use_cpu": True, "report_to": "none", "embedding_cache_dir": f"{folder}/cache"}
    return FastTrainingArguments(output_dir=str(folder), **settings, **given)


def test_all_refusals_are_named_together_and_nothing_is_touched(tmp_path, torch_settings, make_affinity, demo_rows):
    before = torch_settings()
    model, collator = make_affinity()
    args = FastTrainingArguments(
        output_dir=str(tmp_path / "out"),
        speedups=["all"],
        use_cpu=True,
        fp16=True,
        tf32=True,
        per_device_train_batch_size=4,
        effective_batch_size=9,
    )
    with pytest.raises(PlanRefused) as refusal:
        FastTrainer(model, args, collator, demo_rows)
    text = str(refusal.value)
    assert "  tf32: " in text
    assert "  precision: fp16 is not native" in text
    assert "  batch_size: --effective_batch_size 9 is not a multiple of 4 (1 process, " in text
    assert torch_settings() == before
    assert not (tmp_path / "out").exists()


def test_plan_json_holds_decisions_hardware_versions_and_facts(tmp_path, demo_rows, make_affinity):
    model, collator = make_affinity()
    args = make_args(tmp_path, preset="max_speed", speedups=["all"], without=["cpu_matmul"])
    trainer = FastTrainer(model, args, collator, demo_rows)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [entry["name"] for entry in written["decisions"]] == NAMES
    assert written["preset"] == "max_speed"
    assert written["hardware"]["kind"] == "cpu"
    assert torch.__version__.startswith(written["versions"]["torch"].split("+")[0])
    assert written["facts"]["data"]["num_rows"] == 200
    assert written["facts"]["model"]["families"] == ["bert", "esm"]
    assert written["facts"]["data"]["distinct_inputs"]["antigen"] == len(set(demo_rows["antigen"][:]))

    assert "preset max_speed" in trainer.plan.table()


def test_process_wide_settings_are_switched_back_at_the_end_and_where_no_trainer_can_be_built(
    tmp_path, torch_settings, monkeypatch, demo_rows, make_affinity
):
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: True)
    monkeypatch.setattr("hf_ext.speedups.precision.MAX_ERROR", 1.0)
    before = torch_settings()
    model, collator = make_affinity()
    given = (model, make_args(tmp_path, speedups=["cpu_matmul"]), collator, demo_rows)
    trainer = FastTrainer(*given)
    assert torch_settings() != before
    trainer.end()
    assert torch_settings() == before
    with pytest.raises(TypeError):
        FastTrainer(*given, no_such_argument=1)
    assert torch_settings() == before


@pytest.mark.parametrize(("name", "families"), [("frozen", ()), ("lora", ("esm",))])
def test_of_a_generator_the_encoders_are_known_that_run_in_each_step(demo_encoders, name, families):
    spec = read_encoder(demo_encoders[1], None, name, LoraSettings(r=2))
    facts = describe_model(make_on_encoder(spec, **TINY))
    assert facts.families == tuple(sorted((*families, "hf_ext_generator")))
    args = make_args(speedups=["all"])
    context = Context(describe_hardware("A100"), args, facts, DataFacts(has_lengths=True, padding_share_random=0.5))
    assert find_speedup("packing").decide(context).status == ("applied" if families else "skipped")
    assert find_speedup("length_grouping").decide(context).status == "applied"  # the decoder's tokens are not packed
    assert find_speedup("compile").decide(context).status == "skipped"


def test_the_padding_of_random_batches_does_not_depend_on_how_a_file_is_sorted():
    lengths = [30 + i % 971 for i in range(60_000)]  # 20,000 of them are looked at
    shares = [padding_share(order, 16) for order in (lengths, sorted(lengths), sorted(lengths, reverse=True))]
    # Uniform on 30 to 1,000: the longest of 16 is 943 on average, of which a row fills 515.
    assert shares == pytest.approx([1 - 515 / 943] * 3, abs=0.01)
    assert padding_share(sorted(lengths), 16) == shares[1]


def test_use_cpu_is_for_several_launched_processes_without_an_accelerator(monkeypatch):
    launched = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for launcher, has_accelerator, expected in (
        (launched, False, True),
        (launched, True, False),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False, False),
        ({"WORLD_SIZE": "2"}, False, False),  # of a cluster, not of a launcher: nothing says how to meet
        ({**launched, "ACCELERATE_USE_DEEPSPEED": "true"}, False, False),
        ({}, False, False),
    ):
        for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda given=has_accelerator: given)
        assert need_cpu_backend() is expected


def test_processes_that_would_each_train_alone_are_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    check_together(1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    check_together(3)
    with pytest.raises(ArgumentError, match=r"3 processes .* alone, on all rows.*--use_cpu true"):
        check_together(1)
    with pytest.raises(ArgumentError, match="3 processes were launched"):
        FastTrainingArguments(str(tmp_path))


def test_fsdp_is_refused_where_one_process_would_hold_the_whole_model(monkeypatch, tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True)
    check_fsdp(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PlanRefused, match=r"\(cpu\) accelerate would run a single process"):
        check_fsdp(args)


def test_splitting_by_tensor_context_or_sequence_is_refused_with_what_to_take_and_hsdp_passes(monkeypatch, tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for sizes in ({"tp_size": 2}, {"cp_size": 4}, {"sp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}):
        args.parallelism_config = ParallelismConfig(**sizes)
        with pytest.raises(PlanRefused, match=r"cannot split esm, t5: .*fsdp2.*hsdp.*zero3"):
            check_parallelism(args, ("esm", "t5"))
    args.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    check_parallelism(args, ("esm", "t5"))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(PlanRefused, match=r"tp_size=2, cp_size=1, sp_size=1\) cannot split esm"):
        FastTrainer(make_esm(), FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
