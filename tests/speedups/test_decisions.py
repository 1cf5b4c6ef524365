"""What is decided from facts alone, for machines that need not be present; and what an applied decision sets."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from inside import VARIABLES, DataFacts
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_trainer

from hf_ext.errors import PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.speedups import REGISTRY, Context, Run, Speedup, find_speedup
from hf_ext.speedups.base import ModelFacts
from hf_ext.speedups.precision import CpuThreads
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NUMBERS = {"num_parameters": 100, "num_trainable": 100, "num_block_matrices": 6}
ESM = ModelFacts(("esm",), blocks="2 EsmLayer", **NUMBERS)
T5, OTHER = replace(ESM, families=("t5",)), replace(ESM, families=("roformer",))
OPERATOR = ModelFacts(("hf_ext_operator",), blocks="8 OperatorBlock", supports_flex=True, **NUMBERS)
FROZEN = ModelFacts(("esm",), ("heavy", "light"), trains_encoders=False)
ROWS = DataFacts(num_rows=10_000, has_lengths=True, padding_share_random=0.3, distinct_inputs={"heavy": 1200})
EVEN = replace(ROWS, padding_share_random=0.019)
STREAM = DataFacts(streaming=True)


def context(hardware="A100", model=ESM, data=ROWS, cores=8, world_size=1, **given) -> Context:
    args = FastTrainingArguments(output_dir="o", **{"speedups": ["all"], **given})
    return Context(describe_hardware(hardware), args, model, data, world_size, cores)


def decide(name: str, *args, **given):
    return find_speedup(name).decide(context(*args, **given))


def statuses(*args, **given) -> dict[str, str]:
    found = context(*args, **given)
    return {speedup.NAME: speedup.decide(found).status for speedup in REGISTRY}


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


# Flags that change what is learned, or cost time: `all` does not mean them, and their name alone says which flag does.
ASKED = {
    "lora": ({"use_peft": True}, "give --use_peft: it changes what is learned"),
    "muon": ({"speedups": ["muon"]}, None),
    "cpu_offload": ({"speedups": ["cpu_offload"]}, None),
    "token_budget": ({"max_tokens_per_batch": 4096}, None),  # its name alone is refused
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
BUCKETS = {"pad_to_multiple_of": 64, "without": ["packing"]}
GRAPHS = {**BUCKETS, "compile_mode": "reduce-overhead"}
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
    ("fused_qkv", {"hardware": "cpu"}, "applied", ""),
    ("fused_qkv", {}, "skipped", "made for CPUs"),
    ("fused_qkv", {"hardware": "cpu", "attention": "faesm"}, "skipped", "faesm computes them"),
    ("fused_qkv", {"hardware": "cpu", "model": T5}, "skipped", "no ESM encoder"),
    ("fused_qkv", {"hardware": "cpu", **FSDP}, "skipped", "bring the weights of a layer when it is called"),
    ("fused_qkv", {"hardware": "cpu", "speedups": ["all", "compile"]}, "skipped", "compiled blocks fuse it"),
    ("cpu_memory", {}, "skipped", "A100-40GB is not a CPU"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForMaskedLM",))}, "applied", "where there is a label"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForTokenClassification",))}, "skipped", "is none of EsmF"),
    ("masked_lm_head", {"model": replace(ESM, classes=("EsmForMaskedLM",)), "label_smoothing_factor": 0.1}, "skipped",
     "--label_smoothing_factor needs all logits"),
    ("lora", {"use_peft": True, "model": replace(ESM, families=("gpt2",))}, "applied", "all linear layers that repeat"),
    ("lora", {"use_peft": True, "model": ModelFacts()}, "refused", "there is no model to adapt"),
    ("lora", {"use_peft": True, "model": replace(FROZEN, **NUMBERS)}, "refused", "every tower is frozen"),
    ("lora", {"use_peft": True, "model": replace(ESM, families=())}, "refused", "give --lora_target_modules"),
    ("lora_base", {"use_peft": True, "hardware": "T4"}, "applied", ""),
    ("lora_base", {"model": replace(ESM, has_adapters=True)}, "applied", ""),
    ("lora_base", {"use_peft": True, "hardware": "cpu"}, "skipped", "nothing is computed in half precision"),
    ("lora_base", {}, "skipped", "no LoRA"),
    ("lora_base", {"use_peft": True, **FSDP}, "skipped", "spread over processes"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, **FSDP}, "refused", "use DDP"),
    ("encoder_precision", {"use_peft": True, "load_in_8bit": True}, "refused", "BitsAndBytesConfig"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, "load_in_4bit": True}, "refused", "give one of the"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True}, "applied", "linear layers in 8 bits"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, "data": DataFacts()}, "refused", "no training rows"),
    ("encoder_precision", {"model": FROZEN, "load_in_8bit": True, "without": ["encoder_precision"]}, "refused",
     "contradict each other"),
    ("muon", {"speedups": "muon"}, "applied", "6 matrices of 2 EsmLayer get Muon, the rest AdamW"),
    ("muon", {"speedups": "muon", "hardware": "T4"}, "applied", "T4 emulates the bfloat16"),
    ("muon", {"speedups": "muon", "optim": "adafactor"}, "refused", "--optim adafactor was asked for"),
    ("muon", {"speedups": "muon", "use_peft": True}, "refused", "leave out --use_peft or muon"),
    ("muon", {"speedups": "muon", "model": ModelFacts()}, "refused", "there is no model to find matrices in"),
    ("muon", {"speedups": "muon", "model": replace(FROZEN, num_parameters=9)}, "refused", "no matrix of a repeated"),
    ("cpu_offload", {"speedups": "cpu_offload", "hardware": "T4", "fp16": True}, "applied",
     "adamw_torch_fused steps in host memory: its states leave T4"),
    ("cpu_offload", {"speedups": ["muon", "cpu_offload"]}, "applied", "matrix products are slow on a CPU"),
    ("cpu_offload", {"speedups": "cpu_offload", "world_size": 4}, "applied", "each of 4 processes keeps all"),
    ("cpu_offload", {"speedups": "cpu_offload", "hardware": "cpu"}, "refused", "on cpu there is nothing to gain"),
    ("cpu_offload", {"speedups": "cpu_offload", "optim": "sgd"}, "refused", "keeps at most momentum"),
    ("cpu_offload", {"speedups": "cpu_offload", "optim": "adamw_bnb_8bit"}, "refused", "use --optim adamw_torch"),
    ("compile", {"hardware": "T4"}, "applied", "2 EsmLayer, block by block on T4"),
    ("compile", {"hardware": "cpu"}, "skipped", ""),
    ("compile", {"hardware": "cpu", "speedups": ["compile"]}, "applied", ""),
    ("compile", {"hardware": "sm61"}, "skipped", "sm61 is older than Triton's 7.0"),
    ("compile", {"torch_compile": True}, "skipped", "--torch_compile compiles the whole model"),
    ("compile", {"attention": "faesm"}, "skipped", "faesm's attention is not compiled"),
    ("compile", {"attention": "flex"}, "skipped", "flex's attention is not compiled"),
    ("compile", {"compile_mode": "max-autotune-no-cudagraphs", "hardware": "cpu"}, "applied", ""),
    ("compile", {"compile_mode": "reduce-overhead", "speedups": []}, "refused", "Add --speedups compile"),
    ("compile", {"compile_mode": "max-autotune", "hardware": "cpu"}, "refused", "use max-autotune-no-cudagraphs"),
    ("compile", {"compile_mode": "reduce-overhead"}, "refused",
     "add --without packing --pad_to_multiple_of 64, 30% of a random batch at least is padding then"),
    ("compile", {"compile_mode": "max-autotune", "without": ["packing"]}, "refused", "ever other shapes"),
    ("compile", GRAPHS, "applied", "block by block on A100-40GB"),
    ("compile", {"compile_mode": "reduce-overhead", "model": OPERATOR, "data": DataFacts(num_rows=8)}, "applied", ""),
    ("compile", {**GRAPHS, "gradient_accumulation_steps": 2}, "refused", "torch adds up gradients of several passes"),
    ("compile", {**GRAPHS, "activation_checkpointing": True}, "refused", "layers that are computed again would"),
    ("length_buckets", {**BUCKETS}, "applied", "widths are multiples of 64: 30.0% of a random batch is padding"),
    ("length_buckets", {**BUCKETS, "without": []}, "refused", "packed rows have no padding. Add --without packing"),
    ("length_buckets", {**BUCKETS, "model": FROZEN}, "refused", "no encoder runs while training"),
    ("length_buckets", {**BUCKETS, "max_tokens_per_batch": 512}, "refused", "Leave one of them out"),
    ("compile", {"model": ModelFacts(("bert",))}, "skipped", "the model has no repeated layers"),
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
    ("attention", {"attention": "blocked"}, "refused", "made for CPUs, and A100-40GB has faster kernels"),
    ("attention", {"attention": "faesm", "model": T5}, "refused", "the model has no ESM encoder"),
    ("attention", {"attention": "faesm", "hardware": "cpu", "speedups": []}, "applied",
     "faesm's SDPA kernel, as fast as sdpa: flash attention needs compute capability 8.0, cpu is no CUDA device"),
    ("attention", {"attention": "faesm", "hardware": "T4"}, "applied", "T4 has compute capability 7.5"),
    ("attention", {"attention": "faesm"}, "applied", "faesm.fa_utils: ModuleNotFoundError: No module named"),
    ("attention", {"attention": "flash_attn"}, "refused", "flash_attn: is not installed: use --attention auto"),
    ("attention", {"attention": "flash_attn", "hardware": "T4"}, "refused", OLD),
    ("attention", {"attention": "flex", "model": T5}, "applied", ""),
    ("attention", {"attention": "flex", "hardware": "P100"}, "refused", "P100 has no Triton, without which"),
    ("attention", {"attention": "flex", "hardware": "cpu", "model": FROZEN}, "applied", ""),
    ("attention", {"attention": "flex", "model": OPERATOR, "hardware": "mps"}, "refused", "mps has no Triton"),
    ("attention", {"attention": "flex", "model": OTHER}, "refused", NONE),
    ("packing", {"attention": "flex"}, "applied", ""),
    ("packing", {"attention": "faesm"}, "skipped", "attention 'faesm_sdpa' takes no packed sequences"),
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
def test_facts_decide_and_say_why(name, where, status, words):
    decision = decide(name, **where)
    assert decision.status == status
    assert words in decision.reason


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


@pytest.mark.parametrize(
    ("num_rows", "largest", "batch"),
    [(2691, 1024, 32), (65_536, 1024, 1024), (65_535, 1024, 512), (104_800, 100, 64), (1, 1024, 8)],
)
def test_the_cached_batch_leaves_64_steps_an_epoch(num_rows, largest, batch):
    data = replace(ROWS, num_rows=num_rows)
    decision = decide("batch_size", model=FROZEN, data=data, cached_batch_size=largest)
    assert decision.settings["per_device_train_batch_size"] == batch


@pytest.mark.parametrize(
    ("effective", "world_size", "each", "passes"), [(32, 2, 8, 2), (32, 8, 4, 1), (36, 2, 6, 3), (13, 1, 1, 13)]
)
def test_rows_per_device_that_nobody_set_are_the_most_that_divide(effective, world_size, each, passes):
    decision = decide("batch_size", world_size=world_size, effective_batch_size=effective)
    found = {"per_device_train_batch_size": 8, **decision.settings}  # 8 is the default, and the most
    assert found == {"per_device_train_batch_size": each, "gradient_accumulation_steps": passes}


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
    assert find_speedup("precision").decide(found).reason == reason


NAMES = [speedup.NAME for speedup in REGISTRY]


def test_every_speedup_states_its_class_and_has_the_two_functions():
    for speedup in REGISTRY:
        assert isinstance(speedup, Speedup)
        assert speedup.KIND in ("I", "N", "L")
        assert f"Class {speedup.KIND}" in speedup.__doc__
        assert list(inspect.signature(speedup.decide).parameters) == ["context"]
        assert list(inspect.signature(speedup.apply).parameters) == ["decision", "run"]


def test_the_order_of_application_is_the_one_whose_reasons_the_registry_states():
    order = {name: i for i, name in enumerate(NAMES)}
    assert order["cpu_matmul"] == 0
    assert order["fused_gelu"] < order["encoder_precision"] < order["embedding_cache"] < order["batch_size"]
    for earlier in ("precision", "encoder_precision", "lora"):  # parity is proven in the dtype and on the layers to be
        assert order[earlier] < order["attention"]
    assert order["lora"] < order["lora_base"] < order["fused_gelu"]
    assert order["precision"] < order["lora_base"] < order["attention"]
    assert order["attention"] < order["packing"] < order["masked_lm_head"]
    assert order["muon"] < order["sharding"]
    assert order["compile"] == len(NAMES) - 1


WITH, WITHOUT = {"avx512_bf16", "amx_bf16"}, {"avx512_bf16"}


@pytest.mark.parametrize(
    ("flags", "is_amd", "status"), [(WITH, False, "applied"), (WITHOUT, True, "applied"), (WITHOUT, False, "skipped")]
)
def test_a_cpu_that_lists_bf16_is_fast_in_it_with_amx_or_of_amd(tmp_path, monkeypatch, flags, is_amd, status):
    monkeypatch.setattr("hf_ext.hardware._cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: is_amd)
    trainer = make_trainer(tmp_path / "chosen", speedups=["precision"])
    assert trainer.plan["precision"].status == status
    assert trainer.args.bf16 == (status == "applied")
    if status == "skipped":
        assert "products in bf16 are slower there" in trainer.plan["precision"].reason
    assert make_trainer(tmp_path / "asked for", speedups=["precision"], bf16=True).args.bf16


@pytest.fixture
def nobody_said(monkeypatch):
    for name in (*VARIABLES, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def decide_threads(hardware="cpu", cores=4, world_size=1, **given):
    args = make_args(**{"speedups": ["all"], **given})
    return CpuThreads().decide(Context(describe_hardware(hardware), args, world_size=world_size, cpu_cores=cores))


def test_a_cpu_of_several_cores_gets_a_thread_for_each(nobody_said):
    assert (decide_threads().status, decide_threads().settings) == ("applied", {"threads": 4})
    assert decide_threads(hardware="T4").reason == "T4 is not a CPU"
    assert decide_threads(cores=1).reason == "one core"
    assert decide_threads(world_size=2).reason == "2 processes share the cores: the launcher says how many each has"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_set_is_met(nobody_said, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert (decide_threads().status, decide_threads().reason) == ("skipped", f"{name}=3 is set")
    monkeypatch.setenv(name, "")
    assert decide_threads().status == "applied"


def test_a_run_trains_on_a_thread_per_core_and_gives_them_back(nobody_said, monkeypatch, tmp_path):
    alone = make_trainer(tmp_path / "alone")
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    trainer = make_trainer(tmp_path / "run", speedups=["cpu_threads"])
    assert torch.get_num_threads() == 2
    trainer.train()
    trainer.end()
    assert torch.get_num_threads() == 1
    alone.train()
    assert largest_weight_difference(trainer.model, alone.model) < 1e-6


RECOMPUTES = {"ACTIVATION_CHECKPOINTING": "true"}
OFFLOADS = {"OFFLOAD_PARAMS": "true"}
MUON, HOST = {"speedups": "muon"}, {"speedups": "cpu_offload"}


@pytest.fixture
def fsdp2(monkeypatch):
    """The launcher's environment for FSDP2; what is given goes over it."""

    def launch(**given):
        fixed = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "CPU_RAM_EFFICIENT_LOADING": "false"}
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        for name, value in {**fixed, **given}.items():
            monkeypatch.setenv(f"FSDP_{name}", value)

    return launch


def decide_for_two(name="sharding", args=None, world_size=2, **given):
    args = args or make_args(**{"optim": "adamw_torch_fused", **given})
    context = Context(describe_hardware("A100"), args, ESM, world_size=world_size)
    return find_speedup(name).decide(context)


def zero_args(stage=2, offload=False, **given):
    args = make_args(**{"optim": "adamw_torch_fused", **given})
    optimizer = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {"zero_optimization": {"stage": stage, **optimizer}}
    args.deepspeed_plugin = SimpleNamespace(
        hf_ds_config=HfDeepSpeedConfig(config), deepspeed_config=config, zero_stage=stage
    )
    return args


def apply(decision, model=None):
    args = SimpleNamespace(deepspeed_plugin=None)
    return find_speedup("sharding").apply(decision, Run(args, model or make_wide_esm()))


def trainable_esm():
    model = make_wide_esm()
    model.requires_grad_(True)
    return model


def trains_contacts(model):
    return any(p.requires_grad for name, p in model.named_parameters() if "contact_head" in name)


@pytest.mark.parametrize(
    ("name", "launched", "given", "status", "words"),
    [
        ("sharding", {}, {}, "applied", "FSDP2"),
        ("sharding", {"VERSION": "1"}, {}, "refused", "set fsdp_version: 2 (accelerate_configs/fsdp2.yaml)"),
        ("sharding", {"CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "refused", "set fsdp_cpu_ram_efficient_loading: false"),
        ("sharding", {}, {"optim": "adafactor"}, "refused", "--optim adafactor cannot step"),
        ("sharding", {}, {"optim": "sgd", "activation_checkpointing": True}, "applied", ""),
        ("sharding", RECOMPUTES, {}, "applied", ""),
        ("compile", RECOMPUTES, {"speedups": ["compile"]}, "refused", "activation checkpointing"),
        ("compile", {}, {"speedups": ["compile"]}, "applied", ""),
        ("muon", {"VERSION": "1"}, MUON, "refused", ""),
        ("muon", {}, MUON, "applied", ""),
        ("cpu_offload", {}, HOST, "refused", "fsdp2_offload.yaml"),
        ("cpu_offload", {}, {}, "off", ""),
        ("cpu_offload", OFFLOADS, {}, "applied", "FSDP2 keeps weights, gradients and the states of adamw"),
        ("cpu_offload", OFFLOADS, {"optim": "lion_8bit"}, "refused", "use --optim adamw_torch_fused"),
    ],
)
def test_under_fsdp2(fsdp2, name, launched, given, status, words):
    fsdp2(**launched)
    decision = decide_for_two(name, **given)
    assert (decision.status, words in decision.reason) == (status, True), decision.reason


OFFLOADED = {"stage": 3, "offload": True}


@pytest.mark.parametrize(
    ("name", "given", "status", "words"),
    [
        ("sharding", {}, "applied", "DeepSpeed ZeRO-2"),
        ("sharding", OFFLOADED, "applied", "DeepSpeed ZeRO-3; DeepSpeed's CPU Adam makes AdamW's steps on the cpu"),
        ("sharding", {**OFFLOADED, "optim": "sgd"}, "refused", "not --optim sgd: use --optim adamw_torch_fused"),
        ("sharding", {"stage": 3, "optim": "sgd"}, "applied", ""),
        ("precision", {"speedups": ["all"]}, "skipped", "accelerate launch --mixed_precision bf16"),
        ("muon", MUON, "refused", "ZeRO hands the optimizer flat slices"),
        ("cpu_offload", {"stage": 3, **HOST}, "refused", "--offload_optimizer_device cpu"),
    ],
)
def test_under_zero(name, given, status, words):
    decision = decide_for_two(name, zero_args(**given))
    assert (decision.status, words in decision.reason) == (status, True), decision.reason


def test_ddp_that_fails_on_unused_weights_freezes_the_contact_head_and_says_so():
    for given in ({"ddp_find_unused_parameters": False}, {"activation_checkpointing": True}):
        model = trainable_esm()
        decision = apply(decide_for_two(**given), model)
        assert (decision.status, trains_contacts(model)) == ("applied", False)
        assert "2 weights of ESM's contact head are frozen: they never get a gradient" in decision.reason
        assert apply(decide_for_two(**given), model).status == "off"  # nothing is left to freeze


def test_fsdp2_wraps_the_classes_of_the_model_or_those_that_the_user_names(fsdp2):
    fsdp2()
    model = trainable_esm()
    decision = apply(decide_for_two(), model)
    assert decision.reason.startswith("FSDP2; layer by layer (EsmLayer); 2 weights of ESM's contact head are frozen")
    assert not trains_contacts(model)
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmAttention")
    assert apply(decide_for_two()).settings["classes"] == ["EsmAttention"]
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmLayer,T5Block")
    refused = apply(decide_for_two())
    assert (refused.status, "T5Block: the model has no such module" in refused.reason) == ("refused", True)


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


def test_half_precision_of_a_launchers_file_is_refused_by_the_name_of_the_file(tmp_path, monkeypatch):
    with pytest.raises(PlanRefused, match=r"fp16 is not native on cpu\S* and would be emulated: "):
        make_trainer(tmp_path, fp16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    said = r"fp16 comes from the launcher \(mixed_precision of its file.*launch --mixed_precision no, or .*cpu\.yaml"
    with pytest.raises(PlanRefused, match=said):
        make_trainer(tmp_path)


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
