"""What is decided from facts alone, for machines that need not be present."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_ext.hardware import describe_hardware
from hf_ext.optional import import_problem
from hf_ext.speedups import REGISTRY, Context, DataFacts, ModelFacts, Run
from hf_ext.training_args import FastTrainingArguments

NUMBERS = {"num_parameters": 100, "num_trainable": 100, "num_block_matrices": 6}
ESM = ModelFacts(("esm",), blocks="2 EsmLayer", **NUMBERS)
T5, OTHER = replace(ESM, families=("t5",)), replace(ESM, families=("roformer",))
FROZEN = ModelFacts(("esm",), ("heavy", "light"), trains_encoders=False)
ROWS = DataFacts(num_rows=10_000, has_lengths=True, padding_share_random=0.3, distinct_inputs={"heavy": 1200})
EVEN = replace(ROWS, padding_share_random=0.019)
STREAM = DataFacts(streaming=True)


def context(hardware="A100", model=ESM, data=ROWS, cores=8, world_size=1, **given) -> Context:
    args = FastTrainingArguments(output_dir="o", **{"speedups": ["all"], **given})
    return Context(describe_hardware(hardware), args, model, data, world_size, cores)


def decide(name: str, *args, **given):
    return next(s for s in REGISTRY if name == s.NAME).decide(context(*args, **given))


def statuses(*args, **given) -> dict[str, str]:
    found = context(*args, **given)
    return {speedup.NAME: speedup.decide(found).status for speedup in REGISTRY}


# --- every speed-up --------------------------------------------------------------------------------------------------


def test_nothing_is_decided_for_when_nothing_is_asked_for():
    for card in ("cpu-avx512-bf16", "T4", "A100"):
        assert set(statuses(card, speedups=[]).values()) == {"off"}


def test_without_leaves_one_speedup_out_and_no_other():
    follow = {
        "embedding_cache": {"precision", "compile"},  # then encoders run while training
        "attention": {"packing"},  # which needs a kernel for packed rows
        "packing": {"attention"},  # whose kernels pay for packed rows only
    }
    before = statuses("A100", FROZEN)
    for name in before.keys() - {"batch_size"}:
        after = statuses("A100", FROZEN, without=[name])
        assert {n for n in before if before[n] != after[n]} <= {name, *follow.get(name, ())}
        assert after[name] == "off"


def test_deciding_changes_no_argument_and_every_decision_names_its_reason():
    found = context(cached_batch_size=64)
    before = found.args.to_dict()
    decisions = [speedup.decide(found) for speedup in REGISTRY]
    assert found.args.to_dict() == before
    assert all(decision.reason for decision in decisions)


# Flags that change what is learned, or cost time: `all` does not mean them, and their name alone says which flag does.
ASKED = {
    "lora": ({"use_peft": True}, "give --use_peft: it changes what is learned"),
    "muon": ({"speedups": ["muon"]}, None),
    "cpu_offload": ({"speedups": ["cpu_offload"]}, None),
    "quantized_base": ({"use_peft": True, "load_in_8bit": True}, "give --load_in_8bit or --load_in_4bit"),
    "activation_checkpointing": ({"activation_policy": "full"}, None),
    "token_budget": ({"max_tokens_per_batch": 4096}, None),  # its name alone is refused
    "oom_ladder": ({"oom_policy": "step_down"}, None),
    "find_batch_size": ({"speedups": ["find_batch_size"]}, None),
    "batch_size": ({"effective_batch_size": 64}, "--effective_batch_size"),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_applied_on_request_alone(name):
    flags, named = ASKED[name]
    assert decide(name).status == "off"  # with all
    assert decide(name, **{"speedups": [], **flags}).status == "applied"
    assert decide(name, **{**flags, "speedups": ["all", *flags.get("speedups", [])]}).status == "applied"
    if named:
        decision = decide(name, speedups=[name])
        assert (decision.status, named in decision.reason) == ("skipped", True)
    without = decide(name, **flags, without=[name])
    assert without.status == "off" or "contradict each other" in without.reason


OLD = "flash attention needs compute capability 8.0, T4 has compute capability 7.5: use --attention auto"
BEST = "transformers' SDPA is the best there is"
NONE = "known for encoders of type esm, esmc, bert, t5; the model has none"
FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
FACTS = [
    ("precision", {"hardware": "cpu"}, "skipped", ""),
    ("precision", {"hardware": "T4", "bf16": True}, "refused", "bf16 is not native on T4 and would be emul"),
    ("precision", {"hardware": "T4", "bf16": True}, "refused", "use --fp16"),
    ("precision", {"hardware": "cpu", "bf16": True}, "refused", "leave it out"),
    ("precision", {"hardware": "cpu-avx512-bf16", "fp16": True}, "refused", "use --bf16"),
    ("precision", {"bf16": True, "speedups": []}, "applied", ""),
    ("precision", {"model": FROZEN}, "skipped", "only the head trains, and heads stay in float32"),
    ("precision", {"model": FROZEN, "without": ["embedding_cache"]}, "applied", ""),
    ("tf32", {"tf32": True, "speedups": []}, "applied", ""),
    ("tf32", {"hardware": "T4", "tf32": True}, "refused", "T4 has no TF32: leave --tf32 out"),
    ("tf32", {"tf32": False}, "off", ""),
    ("embedding_cache", {"model": FROZEN}, "applied", "frozen: 1,200 heavy distinct"),
    ("embedding_cache", {}, "skipped", "no frozen encoder"),
    ("embedding_cache", {"model": FROZEN, "data": STREAM}, "skipped", "a stream's sequences are not known in advance"),
    ("encoder_precision", {"model": FROZEN, "data": DataFacts()}, "skipped", "no training rows"),
    ("encoder_precision", {"model": FROZEN, "hardware": "cpu"}, "skipped", "neither bf16 nor fp16"),
    ("fused_gelu", {"model": replace(ESM, families=("bert", "esm"))}, "applied", ""),
    ("fused_gelu", {"model": T5}, "skipped", "no ESM encoder"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForMaskedLM",))}, "applied", "where there is a label"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForTokenClassification",))}, "skipped", "is none of EsmF"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForMaskedLM",)), "label_smoothing_factor": 0.1}, "skipped",
     "--label_smoothing_factor needs all logits"),
    ("lora", {"use_peft": True, "model": replace(ESM, families=("gpt2",))}, "applied", "all linear layers that repeat"),
    ("lora", {"use_peft": True, "model": ModelFacts()}, "refused", "pass the model itself instead of model_init"),
    ("lora", {"use_peft": True, "model": replace(FROZEN, **NUMBERS)}, "refused", "every tower is frozen"),
    ("lora", {"use_peft": True, "model": replace(ESM, families=())}, "refused", "give --lora_target_modules"),
    ("lora_base", {"use_peft": True, "hardware": "T4"}, "applied", ""),
    ("lora_base", {"model": replace(ESM, has_adapters=True)}, "applied", ""),
    ("lora_base", {"use_peft": True, "hardware": "cpu"}, "skipped", "nothing is computed in half precision"),
    ("lora_base", {"use_peft": True, "use_dora": True}, "skipped", "DoRA takes norms"),
    ("lora_base", {}, "skipped", "no LoRA"),
    ("lora_base", {"use_peft": True, **FSDP}, "skipped", "spread over processes"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, **FSDP}, "refused", "use DDP"),
    ("lora_base", {"use_peft": True, "load_in_4bit": True}, "skipped", "stores the frozen weights in 4 bits"),
    ("quantized_base", {"load_in_8bit": True}, "refused", "give --use_peft, or keep encoders frozen"),
    ("quantized_base", {"use_peft": True, "load_in_8bit": True, "use_dora": True}, "refused", "DoRA takes norms"),
    ("quantized_base", {"use_peft": True, "load_in_8bit": True, "load_in_4bit": True}, "refused", "give one of the"),
    ("quantized_base", {"use_peft": True, "load_in_8bit": True, "hardware": "cpu"}, "refused",
     "not for training on a CPU"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True}, "applied", "linear layers in 8 bits"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, "data": DataFacts()}, "refused", "no training rows"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, "without": ["encoder_precision"]}, "refused",
     "contradict each other"),
    ("muon", {"speedups": "muon"}, "applied", "6 matrices of 2 EsmLayer get Muon, the rest AdamW"),
    ("muon", {"speedups": "muon", "hardware": "T4"}, "applied", "T4 emulates the bfloat16"),
    ("muon", {"speedups": "muon", "optim": "adafactor"}, "refused", "--optim adafactor was asked for"),
    ("muon", {"speedups": "muon", "use_peft": True}, "refused", "leave out --use_peft or muon"),
    ("muon", {"speedups": "muon", "model": ModelFacts()}, "refused", "pass the model itself instead of model_init"),
    ("muon", {"speedups": "muon", "model": replace(FROZEN, num_parameters=9)}, "refused", "no matrix of a repeated"),
    ("cpu_offload", {"speedups": "cpu_offload", "hardware": "T4", "fp16": True, "nan_policy": "skip"}, "applied",
     "adamw_torch_fused steps in host memory: its states leave T4"),
    ("cpu_offload", {"speedups": ["muon", "cpu_offload"]}, "applied", "matrix products are slow on a CPU"),
    ("cpu_offload", {"speedups": "cpu_offload", "world_size": 4}, "applied", "each of 4 processes keeps all"),
    ("cpu_offload", {"speedups": "cpu_offload", "hardware": "cpu"}, "refused", "on cpu there is nothing to gain"),
    ("cpu_offload", {"speedups": "cpu_offload", "optim": "sgd"}, "refused", "keeps at most momentum"),
    ("cpu_offload", {"speedups": "cpu_offload", "optim": "adamw_bnb_8bit"}, "refused", "use --optim adamw_torch"),
    ("oom_ladder", {"oom_policy": "step_down", "auto_find_batch_size": True}, "refused", "leave it out"),
    ("oom_ladder", {"preset": "max_speed"}, "applied", ""),
    ("oom_ladder", {"preset": "max_speed", "world_size": 2}, "skipped", "find_batch_size finds what fits"),
    ("oom_ladder", {"oom_policy": "step_down", "world_size": 2}, "refused", ""),
    ("find_batch_size", {"speedups": "find_batch_size", "auto_find_batch_size": True}, "refused", "leave it out"),
    ("find_batch_size", {"speedups": "find_batch_size", "data": STREAM}, "refused", ""),
    ("find_batch_size", {"speedups": "find_batch_size", "max_tokens_per_batch": 100}, "refused", ""),
    ("activation_checkpointing", {"activation_checkpointing": True}, "off", ""),  # Trainer's own, as it is
    ("activation_checkpointing", {"activation_policy": "half", "gradient_checkpointing": True}, "refused", "give one"),
    ("activation_checkpointing", {"preset": "low_memory", "activation_checkpointing": True}, "off",
     "--activation_checkpointing true is Trainer's own"),
    ("activation_checkpointing", {"model": FROZEN, "activation_policy": "full"}, "skipped", "no encoder trains"),
    ("activation_checkpointing", {"activation_policy": "full", "torch_compile": True}, "applied", ""),
    ("activation_checkpointing", {"activation_policy": "attention", "torch_compile": True}, "refused",
     "use half or full, or --speedups compile"),
    ("compile", {"hardware": "T4"}, "applied", "2 EsmLayer, block by block on T4"),
    ("compile", {"activation_policy": "attention"}, "applied", ""),
    ("compile", {"hardware": "cpu"}, "skipped", ""),
    ("compile", {"hardware": "cpu", "speedups": ["compile"]}, "applied", ""),
    ("compile", {"hardware": "sm61"}, "skipped", "sm61 is older than Triton's 7.0"),
    ("compile", {"torch_compile": True}, "skipped", "--torch_compile compiles the whole model"),
    ("compile", {"attention": "faesm"}, "skipped", "faesm's attention is not compiled"),
    ("compile", {"attention": "flex"}, "skipped", "was not tried inside of compiled blocks"),
    ("compile", {"model": ModelFacts(("bert",))}, "skipped", "no repeated layers: name them by model.block_pattern"),
    ("compile", {"model": FROZEN}, "skipped", "no encoder trains: blocks run once per distinct sequence"),
    ("attention", {"without": ["precision"]}, "applied", "flash attention needs bf16 or fp16, this run is in float32"),
    ("attention", {"model": replace(ESM, families=("bert", "esm"))}, "applied", "flash attention of A100-40GB"),
    ("attention", {"model": T5}, "applied", "SDPA, with padding around attention only: T5's bias has no flash kernel"),
    ("attention", {"hardware": "T4"}, "applied", "SDPA, with padding around attention only: flash attention needs"),
    ("attention", {"hardware": "cpu"}, "applied", "scores in blocks that stay in the cache"),
    ("attention", {"speedups": ["attention"]}, "skipped", f"without packing, {BEST}"),
    ("attention", {"speedups": ["attention"], "hardware": "cpu"}, "applied", ""),
    ("attention", {"data": EVEN}, "skipped", f"random batches are only 1.9% padding: {BEST}"),
    ("attention", {"model": OTHER}, "skipped", NONE),
    ("attention", {"attention": "varlen", "hardware": "T4"}, "refused", OLD),
    ("attention", {"attention": "varlen", "without": ["precision"]}, "refused", "this run is in float32"),
    ("attention", {"attention": "varlen", "model": T5}, "refused", "T5's relative bias has no flash kernel"),
    ("attention", {"attention": "varlen", "model": replace(ESM, families=("esm", "t5"))}, "applied", ""),
    ("attention", {"attention": "varlen", "speedups": [], "bf16": True}, "applied", ""),
    ("attention", {"attention": "flash_attention_2"}, "refused", "flash_attn: is not installed: use --attention auto"),
    ("attention", {"attention": "blocked"}, "refused", "made for CPUs, and A100-40GB has faster kernels"),
    ("attention", {"attention": "flex", "hardware": "sm61"}, "refused", "is older than Triton's 7.0"),
    ("attention", {"attention": "flex", "hardware": "cpu"}, "refused", "torch has no backward pass of it for cpu"),
    ("attention", {"attention": "flex", "activation_policy": "attention"}, "refused", "use half or full"),
    ("attention", {"attention": "flex", "activation_policy": "full"}, "applied", ""),
    ("attention", {"attention": "faesm", "model": T5}, "refused", "the model has no ESM encoder"),
    ("attention", {"attention": "faesm", "hardware": "cpu", "speedups": []}, "refused",
     "cpu cannot run FlashAttention-2"),
    ("attention", {"attention": "padded", "model": OTHER}, "refused", NONE),
    ("attention", {"attention": "eager", "hardware": "T4", "speedups": []}, "applied", ""),
    ("packing", {"hardware": "sm61", "model": T5}, "applied", ""),
    ("packing", {"data": STREAM}, "applied", ""),  # lengths that nobody knows may differ
    ("packing", {"data": EVEN}, "skipped", "random batches are only 1.9% padding"),
    ("packing", {"attention": "sdpa"}, "skipped", "attention 'sdpa' takes no packed sequences: use --attention auto"),
    ("packing", {"attention": "sdpa", "speedups": ["packing"]}, "refused", "takes no packed sequences"),
    ("packing", {"without": ["attention"]}, "skipped", "add attention to --speedups"),
    ("packing", {"model": OTHER}, "skipped", NONE),
    ("length_grouping", {"model": FROZEN}, "skipped", "no encoder runs while training: nothing is padded"),
    ("length_grouping", {}, "skipped", "packed batches have no padding: rows stay in random order"),
    ("length_grouping", {"without": ["packing"]}, "applied", ""),
    ("length_grouping", {"model": replace(ESM, families=("roformer", "esm"))}, "applied", ""),
    ("length_grouping", {"data": STREAM}, "skipped", "a stream's lengths are not known in advance"),
    ("length_grouping", {"data": EVEN}, "skipped", "random batches are only 1.9% padding"),
    ("length_grouping", {"data": DataFacts(num_rows=5)}, "skipped", "has no column 'length' (--length_column_name)"),
    ("length_grouping", {"train_sampling_strategy": "sequential"}, "skipped", "sequential was asked for"),
    ("length_grouping", {"max_tokens_per_batch": 4096}, "skipped", "--max_tokens_per_batch"),
    ("token_budget", {"speedups": ["token_budget"]}, "refused", "give --max_tokens_per_batch"),
    ("token_budget", {"max_tokens_per_batch": 4096, "train_sampling_strategy": "group_by_length"}, "refused",
     "--train_sampling_strategy group_by_length"),
    ("token_budget", {"max_tokens_per_batch": 4096, "effective_batch_size": 64}, "refused", "--effective_batch_size"),
    ("token_budget", {"max_tokens_per_batch": 4096, "auto_find_batch_size": True}, "refused", "--auto_find_batch_size"),
    ("token_budget", {"max_tokens_per_batch": 4096, "dataloader_drop_last": True}, "refused", "--dataloader_drop_last"),
    ("token_budget", {"max_tokens_per_batch": 4096, "accelerator_config": {"split_batches": True}}, "refused",
     "split_batches"),
    ("token_budget", {"max_tokens_per_batch": 4096, "data": STREAM}, "refused", "stream"),
    ("token_budget", {"max_tokens_per_batch": 4096, "data": DataFacts(num_rows=10)}, "refused", "no column 'length'"),
    ("token_budget", {"max_tokens_per_batch": 4096, "model": FROZEN}, "refused", "no encoder runs while training"),
    ("batch_size", {"effective_batch_size": 32, "world_size": 3}, "refused", "(3 processes): use 30 or 33"),
    ("batch_size", {"effective_batch_size": 1, "per_device_train_batch_size": 4}, "refused", "is not a multiple of 4"),
    ("batch_size", {"effective_batch_size": 36, "gradient_accumulation_steps": 8, "world_size": 2}, "refused",
     "use 32 or 48"),
    ("batch_size", {"effective_batch_size": 32, "world_size": 2, "accelerator_config": {"split_batches": True}},
     "refused", "split_batches"),
    ("batch_size", {"effective_batch_size": 32, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
     "refused", ""),
    ("ddp", {"world_size": 2}, "applied", "gradients are views of what is exchanged"),
    ("ddp", {}, "off", "one process"),
    ("sharding", {"world_size": 2}, "off", "DDP: every process holds the whole model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "status", "words"), FACTS)
def test_facts_decide_and_say_why(monkeypatch, name, where, status, words):
    if where.get("attention") == "flash_attention_2":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        import_problem.cache_clear()
    decision = decide(name, **where)
    import_problem.cache_clear()
    assert decision.status == status
    assert words in decision.reason


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "trained", "frozen"),
    [
        ("P100", None, None),  # float16 by emulated matrix units would be no gain
        ("T4", "fp16", ("fp16", "weights")),
        *((card, "bf16", ("bf16", "weights")) for card in ("A100", "L4", "RTX-4090")),
        ("mps", None, None),
        ("cpu", None, None),
        ("cpu-amx-bf16", "bf16", ("bf16", "autocast")),
    ],
)
def test_each_device_trains_in_what_it_has_units_for(device, trained, frozen):
    assert decide("precision", device).settings.get("mixed_precision") == trained
    settings = decide("encoder_precision", device, FROZEN).settings
    assert (settings["dtype"], settings["mode"]) == frozen if frozen else settings == {}


@pytest.mark.parametrize(
    ("device", "compiles", "onednn", "loading"),
    [
        ("P100", "skipped", "skipped", (7, True)),  # older than Triton's 7.0
        ("T4", "applied", "skipped", (7, True)),
        ("mps", "skipped", "skipped", (0, False)),
        ("cpu", "skipped", "applied", (0, False)),
    ],
)
def test_what_compiles_and_what_loads_by_device(device, compiles, onednn, loading):
    assert decide("compile", device).status == compiles
    assert decide("cpu_matmul", device).status == onednn
    settings = decide("data_loading", device).settings
    assert (settings["dataloader_num_workers"], settings["dataloader_pin_memory"]) == loading


# --- batch size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "largest", "batch"),
    [(2691, 1024, 32), (65_536, 1024, 1024), (65_535, 1024, 512), (104_800, 100, 64), (1, 1024, 8)],
)
def test_the_cached_batch_leaves_64_steps_an_epoch(num_rows, largest, batch):
    data = replace(ROWS, num_rows=num_rows)
    decision = decide("batch_size", model=FROZEN, data=data, cached_batch_size=largest)
    assert decision.settings["per_device_train_batch_size"] == batch


def test_the_cached_batch_is_split_over_processes_and_given_up_for_a_size_set_by_hand():
    given = {"model": FROZEN, "data": replace(ROWS, num_rows=104_800), "cached_batch_size": 1024}
    decision = decide("batch_size", **given)
    assert decision.settings == {"per_device_train_batch_size": 1024, "gradient_accumulation_steps": 1}
    assert decide("batch_size", world_size=4, **given).settings["per_device_train_batch_size"] == 256
    assert decide("batch_size", **given, effective_batch_size=512).settings["per_device_train_batch_size"] == 512
    assert decide("batch_size", **given, per_device_train_batch_size=32).status == "off"
    assert decide("batch_size", **{**given, "model": ESM}).status == "off"
    assert decide("batch_size", **given, without=["embedding_cache"]).status == "off"


def test_the_effective_batch_is_reached_by_accumulation_and_the_rate_stays_on_any_number_of_processes():
    given = {"per_device_train_batch_size": 4, "effective_batch_size": 32, "learning_rate": 1e-3}
    for world_size, passes in ((1, 8), (2, 4), (8, 1)):
        decision = decide("batch_size", world_size=world_size, **given)
        assert (decision.status, decision.settings) == ("applied", {"gradient_accumulation_steps": passes})
        assert "the learning rate stays as given" in decision.reason


@pytest.mark.parametrize(
    ("effective", "world_size", "each", "passes"), [(32, 2, 8, 2), (32, 8, 4, 1), (36, 2, 6, 3), (13, 1, 1, 13)]
)
def test_rows_per_device_that_nobody_set_are_the_most_that_divide(effective, world_size, each, passes):
    decision = decide("batch_size", world_size=world_size, effective_batch_size=effective)
    found = {"per_device_train_batch_size": 8, **decision.settings}  # 8 is the default, and the most
    assert found == {"per_device_train_batch_size": each, "gradient_accumulation_steps": passes}


def test_a_row_cap_of_a_token_budget_is_the_users_and_not_a_presets():
    given = {"max_tokens_per_batch": 4096}
    assert decide("token_budget", **given, per_device_train_batch_size=16).settings["max_batch_size"] == 16
    preset = context(**given, per_device_train_batch_size=1)
    preset.args.mark_explicit(frozenset({"max_tokens_per_batch"}))
    (budget,) = [one for one in REGISTRY if one.NAME == "token_budget"]
    assert budget.decide(preset).settings == {"max_tokens": 4096, "max_batch_size": None}


def test_finding_the_batch_size_is_refused_for_a_loss_that_compares_rows_and_named_for_one_of_the_users():
    (finder,) = [one for one in REGISTRY if one.NAME == "find_batch_size"]
    decision = decide("find_batch_size", speedups="find_batch_size")
    ranking = SimpleNamespace(config=SimpleNamespace(loss="ranking"))
    refused = finder.apply(decision, Run(None, ranking))
    assert (refused.status, "compares the rows" in refused.reason) == ("refused", True)
    changed = finder.apply(decision, Run(None, None, own_loss="Mine.compute_loss"))
    assert (changed.status, changed.kind) == ("applied", "L")
    assert finder.apply(decision, Run(None, None)) == decision


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "world_size", "workers"), [(8, 1, 7), (16, 1, 8), (8, 4, 1), (2, 4, 0)])
def test_on_a_gpu_workers_are_the_cores_that_are_left(cores, world_size, workers):
    settings = decide("data_loading", cores=cores, world_size=world_size).settings
    assert (
        settings.items()
        >= {
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": True,
            "dataloader_prefetch_factor": 4 if workers else None,
            "non_blocking": True,
        }.items()
    )
    assert decide("data_loading", model=FROZEN).settings["dataloader_num_workers"] == 0  # look-ups in a cache


def test_fields_that_the_user_set_are_left_alone():
    given = {"dataloader_num_workers": 3, "dataloader_prefetch_factor": 2, "accelerator_config": {"even_batches": True}}
    settings = decide("data_loading", **given).settings
    assert settings["dataloader_pin_memory"] is True
    assert settings.keys().isdisjoint({*given, "non_blocking"})


# --- several GPUs in one process --------------------------------------------------------------------------------------


def test_forwards_are_not_replaced_where_dataparallel_would_copy_them(monkeypatch):
    monkeypatch.setattr(FastTrainingArguments, "n_gpu", 2)
    model = replace(ESM, classes=("EsmForMaskedLM",))
    for name in ("fused_gelu", "packing", "masked_lm_head"):
        decision = decide(name, "T4", model)
        assert decision.status == "skipped"
        assert decision.reason == "2 GPUs in one process (DataParallel): start it with accelerate launch"
    assert decide("packing", "T4", model, speedups=["packing", "attention"]).status == "refused"


@pytest.mark.parametrize(
    ("card", "refused", "reason"),
    [
        ("A100", "bf16", "--bf16 false was asked for"),
        ("T4", "bf16", "T4 has fp16 but no native bf16"),  # none would have been used
    ],
)
def test_half_precision_that_was_refused_is_not_used(card, refused, reason):
    found = context(card)
    found.args.mark_explicit(found.args.explicit_fields | {refused})
    (precision,) = [one for one in REGISTRY if one.NAME == "precision"]
    assert precision.decide(found).reason == reason
