"""What is decided from facts alone, for machines that need not be present."""

from dataclasses import replace

import pytest

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import REGISTRY, Context, DataFacts, ModelFacts
from hf_ext.speedups import batch_size as batch_size_module
from hf_ext.training_args import FastTrainingArguments

FROZEN = ModelFacts(("esm",), ("heavy", "light"), trains_encoders=False)
NO_LENGTHS = "the dataset has no column 'length' (--length_column_name); rows of one size, as images are, need none"
LORA = ModelFacts(("esm",), (), trains_encoders=True, blocks="2 EsmLayer")
ROWS = DataFacts(num_rows=10_000, has_lengths=True, padding_share_random=0.3, distinct_inputs={"heavy": 1200})


def context(hardware="cpu", model=FROZEN, data=ROWS, cores=8, world_size=1, **given) -> Context:
    args = FastTrainingArguments(output_dir="o", **{"speedups": ["all"], **given})
    return Context(describe_hardware(hardware), args, model, data, world_size, cores)


def decide(name: str, *args, **given):
    return next(s for s in REGISTRY if name == s.NAME).decide(context(*args, **given))


def statuses(*args, **given) -> dict[str, str]:
    found = context(*args, **given)
    return {speedup.NAME: speedup.decide(found).status for speedup in REGISTRY}


# --- all at once, on described machines ------------------------------------------------------------------------------


def test_a_t4_gets_fp16_and_neither_tf32_nor_bf16():
    assert statuses("T4", LORA) == {
        "cpu_matmul": "skipped",
        "cpu_threads": "skipped",
        "tf32": "skipped",
        "lora": "off",
        "quantized_base": "off",
        "lora_base": "skipped",
        "fused_gelu": "applied",
        "encoder_precision": "skipped",
        "embedding_cache": "skipped",
        "precision": "applied",
        "attention": "applied",
        "packing": "applied",
        "masked_lm_head": "skipped",
        "batch_size": "off",
        "find_batch_size": "off",
        "oom_ladder": "off",
        "length_grouping": "skipped",
        "token_budget": "off",
        "data_loading": "applied",
        "muon": "off",
        "cpu_offload": "off",
        "activation_checkpointing": "off",
        "nccl": "off",
        "sharding": "off",
        "ddp": "off",
        "compile": "applied",
    }
    assert decide("precision", "T4", LORA).settings == {"mixed_precision": "fp16"}
    assert decide("encoder_precision", "T4").settings == {"dtype": "fp16", "mode": "weights", "max_noise": 0.05}


@pytest.mark.parametrize("card", ["A100", "H100", "L4", "RTX-4090"])
def test_ampere_and_later_get_bf16_weights_and_tf32(card):
    assert decide("precision", card, LORA).settings == {"mixed_precision": "bf16"}
    assert decide("encoder_precision", card).settings["dtype"] == "bf16"
    assert decide("encoder_precision", card).settings["mode"] == "weights"
    assert decide("tf32", card).status == "applied"


def test_a_cpu_without_bf16_instructions_stays_in_float32():
    assert decide("precision", "cpu", LORA).status == "skipped"
    assert decide("encoder_precision", "cpu").status == "skipped"
    assert "neither bf16 nor fp16" in decide("encoder_precision", "cpu").reason
    assert decide("cpu_matmul", "cpu").status == "applied"


@pytest.mark.parametrize("cpu", ["cpu-avx512-bf16", "cpu-amx-bf16"])
def test_a_cpu_with_bf16_instructions_uses_them_under_autocast(cpu):
    assert decide("precision", cpu, LORA).settings == {"mixed_precision": "bf16"}
    assert decide("encoder_precision", cpu).settings == {"dtype": "bf16", "mode": "autocast", "max_noise": 0.05}


@pytest.mark.parametrize(
    ("device", "trained", "frozen"),
    [
        ("P100", None, None),  # float16 by emulated matrix units would be no gain
        ("V100", "fp16", ("fp16", "weights")),
        ("T4", "fp16", ("fp16", "weights")),
        ("A100", "bf16", ("bf16", "weights")),
        ("B200", "bf16", ("bf16", "weights")),
        ("mps", None, None),
        ("cpu", None, None),
        ("cpu-amx-bf16", "bf16", ("bf16", "autocast")),
    ],
)
def test_each_device_trains_in_what_it_has_units_for(device, trained, frozen):
    assert decide("precision", device, LORA).settings.get("mixed_precision") == trained
    settings = decide("encoder_precision", device).settings
    assert (settings["dtype"], settings["mode"]) == frozen if frozen else settings == {}


@pytest.mark.parametrize(
    ("device", "compiles", "onednn", "loading"),
    [
        ("P100", "skipped", "skipped", (7, True)),  # older than Triton's 7.0
        ("V100", "applied", "skipped", (7, True)),
        ("T4", "applied", "skipped", (7, True)),
        ("H100", "applied", "skipped", (7, True)),
        ("mps", "skipped", "skipped", (0, False)),
        ("cpu", "skipped", "applied", (0, False)),
    ],
)
def test_what_compiles_and_what_loads_by_device(device, compiles, onednn, loading):
    assert decide("compile", device, LORA).status == compiles
    assert decide("cpu_matmul", device, LORA).status == onednn
    settings = decide("data_loading", device, LORA).settings
    assert (settings["dataloader_num_workers"], settings["dataloader_pin_memory"]) == loading


def test_nothing_is_decided_for_when_nothing_is_asked_for():
    for card in ("cpu-avx512-bf16", "T4", "A100"):
        assert set(statuses(card, speedups=[]).values()) == {"off"}


@pytest.mark.parametrize("name", [s.NAME for s in REGISTRY if s.NAME != "batch_size"])
def test_without_leaves_one_speedup_out_and_no_other(name):
    before, after = statuses("A100"), statuses("A100", without=[name])
    follow = {
        "embedding_cache": {"precision", "compile"},  # then encoders run while training
        "attention": {"packing"},  # which needs a kernel for packed rows
        "packing": {"attention"},  # whose kernels pay for packed rows only
    }
    assert {n for n in before if before[n] != after[n]} <= {name, *follow.get(name, ())}
    assert after[name] == "off"


def test_a_single_speedup_can_be_named():
    assert [n for n, status in statuses("A100", speedups=["tf32"]).items() if status == "applied"] == ["tf32"]


def as_text(args) -> dict[str, str]:
    """Every value as text; sets in order, which a set has none of."""
    return {name: str(sorted(v) if isinstance(v, frozenset) else v) for name, v in vars(args).items()}


@pytest.mark.parametrize("hardware", ["T4", "A100", "cpu-avx512-bf16"])
def test_deciding_changes_no_argument_and_every_decision_names_its_reason(hardware):
    found = context(hardware, LORA, cached_batch_size=64)
    before = as_text(found.args)
    decisions = [speedup.decide(found) for speedup in REGISTRY]
    assert as_text(found.args) == before
    found.args.learning_rate = 1.0
    assert as_text(found.args) != before
    assert all(decision.reason for decision in decisions)


# --- precision and tf32 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "asked", "status", "remedy"),
    [
        ("T4", "bf16", "refused", "use --fp16"),
        ("cpu", "bf16", "refused", "leave it out"),
        ("cpu-avx512-bf16", "fp16", "refused", "use --bf16"),
        ("sm61", "fp16", "refused", "leave it out"),
        ("A100", "bf16", "applied", None),
        ("A100", "fp16", "applied", None),
        ("T4", "fp16", "applied", None),
        ("cpu-avx512-bf16", "bf16", "applied", None),
    ],
)
def test_precision_that_is_asked_for_is_met_natively_or_refused_with_a_remedy(hardware, asked, status, remedy):
    for speedups in ([], ["all"]):
        decision = decide("precision", hardware, LORA, speedups=speedups, **{asked: True})
        assert decision.status == status
        assert remedy is None or decision.reason.endswith(remedy)
        assert decision.settings == ({"mixed_precision": asked} if status == "applied" else {})


def test_a_head_on_cached_embeddings_is_not_put_into_half_precision():
    decision = decide("precision", "A100", FROZEN)
    assert (decision.status, decision.reason) == ("skipped", "only the head trains, and heads stay in float32")
    assert decide("precision", "A100", FROZEN, without=["embedding_cache"]).status == "applied"


def test_tf32_that_is_asked_for_is_met_refused_or_left_off():
    assert decide("tf32", "A100", speedups=[], tf32=True).status == "applied"
    refused = decide("tf32", "T4", speedups=[], tf32=True)
    assert (refused.status, refused.reason) == ("refused", "T4 has no TF32: leave --tf32 out")
    assert decide("tf32", "A100", tf32=False).status == "off"


# --- embedding cache and what follows from it ------------------------------------------------------------------------


def test_the_embedding_cache_takes_the_frozen_inputs():
    decision = decide("embedding_cache", "cpu", embedding_cache_dir="here")
    assert decision.settings == {"inputs": ["heavy", "light"], "tokens_per_batch": 2048, "cache_dir": "here"}
    assert decision.reason == "frozen: 1,200 heavy distinct"
    assert decide("embedding_cache", "A100").settings["tokens_per_batch"] == 65536


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (LORA, ROWS, "no frozen encoder"),
        (FROZEN, DataFacts(streaming=True), "a stream's sequences are not known in advance"),
    ],
)
def test_the_embedding_cache_is_skipped_where_it_cannot_be(model, data, reason):
    decision = decide("embedding_cache", "cpu", model, data)
    assert (decision.status, decision.reason) == ("skipped", reason)


@pytest.mark.parametrize("data", [DataFacts(), DataFacts(streaming=True)])
def test_encoder_precision_is_skipped_without_rows_to_measure_on(data):
    decision = decide("encoder_precision", "A100", FROZEN, data)
    assert decision.status == "skipped"
    assert "no training rows" in decision.reason


def test_fused_gelu_is_for_esm():
    assert decide("fused_gelu", model=replace(FROZEN, families=("bert", "esm"))).status == "applied"
    assert decide("fused_gelu", model=replace(FROZEN, families=("bert",))).reason == "no ESM encoder"


# --- batch size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "largest", "batch"),
    [
        (104_800, 1024, 1024),  # 102 steps
        (2691, 1024, 32),  # 84 steps; 64 rows would leave 42
        (100, 1024, 8),
        (65_536, 1024, 1024),  # exactly 64 steps
        (65_535, 1024, 512),
        (104_800, 100, 64),
        (1, 1024, 8),
    ],
)
def test_the_cached_batch_leaves_64_steps_an_epoch(num_rows, largest, batch):
    assert batch_size_module.cached_batch_size(num_rows, largest) == batch


def test_the_cached_batch_is_split_over_processes_and_given_up_for_a_size_set_by_hand():
    data = replace(ROWS, num_rows=104_800)
    given = {"cached_batch_size": 1024}
    decision = decide("batch_size", "A100", data=data, **given)
    assert decision.settings == {"per_device_train_batch_size": 1024, "gradient_accumulation_steps": 1}
    assert decide("batch_size", "A100", data=data, world_size=4, **given).settings["per_device_train_batch_size"] == 256
    for by_hand in (
        {"per_device_train_batch_size": 32},
        {"gradient_accumulation_steps": 2},
        {"without": ["batch_size"]},
    ):
        assert decide("batch_size", "A100", data=data, **given, **by_hand).status == "off"
    assert decide("batch_size", "A100", LORA, data, **given).status == "off"
    assert decide("batch_size", "A100", data=data, without=["embedding_cache"], **given).status == "off"


def test_the_effective_batch_is_reached_by_accumulation_and_the_rate_stays_on_any_number_of_processes():
    given = {"per_device_train_batch_size": 4, "effective_batch_size": 32, "learning_rate": 1e-3}
    for world_size, passes in ((1, 8), (2, 4), (8, 1)):
        decision = decide("batch_size", world_size=world_size, **given)
        assert (decision.status, decision.settings) == ("applied", {"gradient_accumulation_steps": passes})
        assert "the learning rate stays as given" in decision.reason
        for scaling, rate in (("linear", 8e-3), ("sqrt", 8**0.5 * 1e-3)):  # 32 rows against 4
            scaled = decide("batch_size", world_size=world_size, **given, lr_scaling=scaling)
            assert scaled.settings["learning_rate"] == pytest.approx(rate)
            assert f"--lr_scaling {scaling}" in scaled.reason


@pytest.mark.parametrize(
    ("effective", "world_size", "each", "passes"),
    [(32, 1, 8, 4), (32, 2, 8, 2), (32, 8, 4, 1), (36, 2, 6, 3), (13, 1, 1, 13), (4, 4, 1, 1)],
)
def test_rows_per_device_that_nobody_set_are_the_most_that_divide(effective, world_size, each, passes):
    decision = decide("batch_size", world_size=world_size, effective_batch_size=effective)
    found = {"per_device_train_batch_size": 8, **decision.settings}  # 8 is the default, and the most
    assert found == {"per_device_train_batch_size": each, "gradient_accumulation_steps": passes}
    assert each * world_size * passes == effective


def test_heads_on_cached_embeddings_take_the_effective_batch_in_one_pass():
    given = {"cached_batch_size": 1024, "effective_batch_size": 512}
    decision = decide("batch_size", "A100", data=ROWS, world_size=2, **given)
    assert decision.settings == {"per_device_train_batch_size": 256, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(("asked", "nearest"), [(30, "28 or 32"), (33, "32 or 36"), (1, "4"), (42, "40 or 44")])
def test_an_effective_batch_that_does_not_divide_is_refused_with_the_nearest(asked, nearest):
    decision = decide("batch_size", per_device_train_batch_size=4, effective_batch_size=asked)
    assert decision.status == "refused"
    reason = f"--effective_batch_size {asked} is not a multiple of 4 (1 process, --per_device_train_batch_size 4): use "
    assert decision.reason == reason + nearest


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"effective_batch_size": 32, "world_size": 3}, "not a multiple of 3 (3 processes): use 30 or 33"),
        ({"effective_batch_size": 3, "world_size": 4}, "not a multiple of 4 (4 processes): use 4"),
        ({"effective_batch_size": 36, "gradient_accumulation_steps": 8, "world_size": 2}, "use 32 or 48"),
        ({"effective_batch_size": 32, "world_size": 2, "accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_a_step_that_cannot_be_had_is_refused_with_what_can(given, reason):
    decision = decide("batch_size", model=LORA, **given)
    assert decision.status == "refused"
    assert reason in decision.reason


def test_a_rate_that_is_to_follow_no_batch_size_is_refused():
    alone = decide("batch_size", model=LORA, lr_scaling="linear")
    assert alone.status == "refused"
    assert "give --effective_batch_size" in alone.reason
    assert decide("batch_size", model=LORA, lr_scaling="linear", effective_batch_size=16).status == "applied"


def test_an_effective_batch_that_contradicts_the_accumulation_asked_for_is_refused():
    given = {"per_device_train_batch_size": 4, "effective_batch_size": 32}
    assert decide("batch_size", **given, gradient_accumulation_steps=2).status == "refused"
    assert decide("batch_size", **given, gradient_accumulation_steps=8).status == "applied"


def test_naming_batch_size_without_a_size_says_what_to_give():
    decision = decide("batch_size", speedups=["batch_size"])
    assert decision.status == "skipped"
    assert "--effective_batch_size" in decision.reason


# --- loading and grouping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "world_size", "workers"), [(8, 1, 7), (16, 1, 8), (8, 4, 1), (2, 4, 0), (1, 1, 0)])
def test_on_a_gpu_workers_are_the_cores_that_are_left(cores, world_size, workers):
    settings = decide("data_loading", "A100", LORA, cores=cores, world_size=world_size).settings
    assert settings == {
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": True,
        "dataloader_prefetch_factor": 4 if workers else None,
        "non_blocking": True,
    }


def test_a_cpu_and_a_cache_need_no_workers():
    assert decide("data_loading", "cpu", LORA).settings["dataloader_num_workers"] == 0
    cached = decide("data_loading", "A100", FROZEN)
    assert cached.settings["dataloader_num_workers"] == 0
    assert "look-ups" in cached.reason


def test_fields_that_the_user_set_are_left_alone():
    given = {"dataloader_num_workers": 3, "dataloader_prefetch_factor": 2, "accelerator_config": {"even_batches": True}}
    settings = decide("data_loading", "A100", LORA, **given).settings
    assert settings == {"dataloader_pin_memory": True}


def test_workers_that_the_user_set_decide_what_depends_on_them():
    three = decide("data_loading", "cpu", LORA, dataloader_num_workers=3).settings
    assert three["dataloader_prefetch_factor"] == 4
    none = context("A100", LORA)
    none.args.mark_explicit(frozenset({"dataloader_num_workers"}))  # 0, typed
    settings = next(s for s in REGISTRY if s.NAME == "data_loading").decide(none).settings
    assert settings["dataloader_prefetch_factor"] is None


def test_pinned_memory_that_a_preset_switched_off_stays_off():
    low_memory = context("A100", LORA, dataloader_pin_memory=False)
    low_memory.args.mark_explicit(frozenset())  # from a preset, not from the user
    settings = next(s for s in REGISTRY if s.NAME == "data_loading").decide(low_memory).settings
    assert settings["dataloader_pin_memory"] is False


@pytest.mark.parametrize(
    ("model", "data", "given", "reason"),
    [
        (FROZEN, ROWS, {}, "no encoder runs while training: nothing is padded"),
        (LORA, ROWS, {}, "packed batches have no padding: rows stay in random order"),
        (LORA, DataFacts(streaming=True), {}, "a stream's lengths are not known in advance"),
        (LORA, replace(ROWS, padding_share_random=0.019), {}, "random batches are only 1.9% padding"),
        (LORA, DataFacts(num_rows=5), {}, NO_LENGTHS),
        (
            LORA,
            ROWS,
            {"train_sampling_strategy": "sequential"},
            "--train_sampling_strategy sequential was asked for",
        ),
    ],
)
def test_length_grouping_is_skipped_where_it_gains_nothing_or_cannot_be(model, data, given, reason):
    decision = decide("length_grouping", "cpu", model, data, **given)
    assert (decision.status, decision.reason) == ("skipped", reason)


def test_length_grouping_is_applied_where_encoders_run_on_padding():
    decision = decide("length_grouping", "cpu", LORA, without=["packing"])
    assert (decision.status, decision.evidence) == ("applied", {"padding_share_random": 0.3})
    assert decide("length_grouping", "cpu", FROZEN, without=["embedding_cache", "packing"]).status == "applied"
    other = replace(LORA, families=("roformer",))
    assert decide("length_grouping", "cpu", other).status == "applied"


# --- several GPUs in one process -------------------------------------------------------------------------------------


def test_forwards_are_not_replaced_where_dataparallel_would_copy_them(monkeypatch):
    monkeypatch.setattr(FastTrainingArguments, "n_gpu", 2)
    model = replace(LORA, classes=("EsmForMaskedLM",))
    for name in ("fused_gelu", "packing", "masked_lm_head"):
        decision = decide(name, "T4", model)
        assert (decision.status, decision.reason) == (
            "skipped",
            "2 GPUs in one process (DataParallel): start it with accelerate launch",
        )
    assert decide("packing", "T4", model, speedups=["packing", "attention"]).status == "refused"
    assert decide("length_grouping", "T4", model).status == "applied"


@pytest.mark.parametrize(
    ("card", "refused", "reason"),
    [
        ("A100", "bf16", "--bf16 false was asked for"),
        ("T4", "fp16", "--fp16 false was asked for"),
        ("T4", "bf16", "T4 has fp16 but no native bf16"),  # none would have been used
    ],
)
def test_half_precision_that_was_refused_is_not_used(card, refused, reason):
    found = context(card, LORA)
    found.args.mark_explicit(found.args.explicit_fields | {refused})
    (precision,) = [one for one in REGISTRY if one.NAME == "precision"]
    assert precision.decide(found).reason == reason
