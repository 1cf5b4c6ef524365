"""What `FastTrainingArguments` add to those of Trainer, and how models predict; ranges stand in the types."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from .checks import ABOVE_ZERO, COUNT, NOT_NEGATIVE, check_ranges
from .presets import PRESETS

CACHE_DIR = "~/.cache/hf_ext/embeddings"
Count = Annotated[int, COUNT]
Positive = Annotated[float, ABOVE_ZERO]

FIRST_FLAGS = (  # of training, on the first page of --help
    *("preset", "output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
    *("resume", "max_hours", "push_to_hub", "hub_model_id"),
)
REQUIRE = (  # help of the field `require` of a recipe's arguments
    'What the final scores must be, each in quotes: "spearman>=0.60" "rmse<=1.35"; of training also "speed>=3", '
    "batches per second. Where one is not, exit status 3, after everything was written."
)


def option(default: object, help: str) -> Any:
    """Makes a field of a dataclass with what `--help` says of it; it must be given where its default is `MISSING`."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(repr=False)  # TrainingArguments' own hides tokens
class SpeedArguments:
    """What makes a run faster or smaller, and leaves what is learned as it is unless the help says otherwise."""

    _argument_group_name = "speed-ups"  # in --help

    preset: str | None = option(None, f"{', '.join(PRESETS)}; several joined by '+', or none. Recorded in the plan.")
    speedups: list[str] = option(
        [],
        "Speed-ups to use where they fit, by name. 'all': those that leave what is learned as it is, without "
        "cpu_offload (the optimizer in host memory), which costs time. muon (torch's Muon for the matrices of repeated "
        "layers, AdamW for the rest) learns otherwise: sweep the rate. Example: --speedups all muon.",
    )
    without: list[str] = option(
        [], "Speed-ups to leave out of --speedups all, by name; 'numerics': those that change how numbers are rounded."
    )
    cached_batch_size: Count | None = option(
        None,
        "Most rows per step of a head that trains on cached embeddings. --per_device_train_batch_size, where it is "
        "given, decides instead.",
    )
    embedding_cache_dir: str = option(CACHE_DIR, "Where embeddings of frozen encoders are kept.")
    attention: Literal["auto", "faesm", "varlen", "flash_attn", "flex", "blocked", "padded", "sdpa", "eager"] = option(
        "auto",
        "Attention of ESM, BERT and T5 encoders; auto takes the fastest one for this hardware; flash_attn is the "
        "package, flex torch's FlexAttention, for any model of transformers that has it.",
    )
    profile: bool = option(
        False,
        "Run steps 10 to 13 of each start under torch.profiler: profile_trace.json.gz in the output folder, and the "
        "ten most costly operations in the log.",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default",
        "torch.compile's mode for compiled layers. reduce-overhead and max-autotune replay CUDA graphs, for batches of "
        "few shapes: --without packing --pad_to_multiple_of 64.",
    )
    pad_to_multiple_of: Count | None = option(
        None, "Rows of tokens are padded to a multiple of this, for few shapes of batches; the plan says what it costs."
    )
    activation_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "What is computed again in the backward pass, and not kept for it: layers, attention or "
            "feed_forward of each, or n: every n-th layer. true: all layers, by the model's own switch.",
            "nargs": "?",
            "const": "true",
        },
    )


@dataclass(repr=False)
class LoraArguments:
    """Adapters beside a frozen base, and the bits of frozen encoders."""

    _argument_group_name = "model"

    use_peft: bool = option(False, "LoRA: adapters train beside frozen encoder weights. Changes what is learned.")
    lora_r: int = option(8, "LoRA rank.")
    lora_alpha: int = option(16, "LoRA scale: updates are multiplied by alpha / r.")
    lora_dropout: float = option(0.0, "Dropout before LoRA's first matrix; above 0 it keeps a copy of every input.")
    lora_target_modules: list[str] | None = option(
        None, "Linear layers to adapt, by the end of their names; left out: all of the family's."
    )
    lora_kwargs: dict[str, Any] | str | None = option(
        None, """Other arguments of peft.LoraConfig, as JSON: '{"use_dora": true}'."""
    )
    load_in_8bit: bool = option(False, "Linear layers of frozen encoders in 8 bits a weight (bitsandbytes).")
    load_in_4bit: bool = option(
        False,
        "As --load_in_8bit, in 4 bits (nf4); with --use_peft those beside adapters, too (QLoRA), of hf-ext train.",
    )


@dataclass(repr=False)
class StepArguments:
    """What a step learns from, and what happens where it cannot."""

    _argument_group_name = "training"

    effective_batch_size: Count | None = option(
        None, "Rows per optimizer step over all processes; sets accumulation. Changes what is learned."
    )
    lr_scaling: Literal["linear", "sqrt"] | None = option(
        None,
        "Multiply all learning rates by the rows of an optimizer step over --lr_base_batch_size, or by the root of "
        "that. Changes what is learned.",
    )
    lr_base_batch_size: Count | None = option(
        None, "Rows of the optimizer step that the learning rates were chosen for; needs --lr_scaling."
    )
    find_batch_size: bool = option(
        False, "Find the most rows of a pass that fit (up to 128); accumulation keeps the rows of an optimizer step."
    )
    max_tokens_per_batch: Count | None = option(
        None, "Tokens per device and pass, special tokens included; the number of rows varies. Changes what is learned."
    )
    encoder_learning_rate: Positive | None = option(
        None, "Learning rate of encoders that train; --learning_rate is then the head's."
    )
    nan_policy: Literal["stop", "skip"] = option(
        "stop", "A step whose loss or gradient is not finite ends the run, or is left out (skip)."
    )
    nan_skip_limit: Count = option(3, "Most steps in a row that --nan_policy skip leaves out.")


@dataclass(repr=False)
class SavingArguments:
    """What is saved when and where, how long a run may take, and how it goes on."""

    _argument_group_name = "checkpoints"

    resume: str = option(
        "no",
        "'auto' continues from the newest intact checkpoint in output_dir, 'no' starts again, anything else "
        "is the folder of a checkpoint.",
    )
    allow_changed: list[str] = option(
        [], "What may differ from the checkpoint's run: argument names, 'data', 'model', or 'all'."
    )
    save_minutes: Positive | None = option(
        None, "Also save when this many minutes have passed since the last checkpoint."
    )
    max_hours: Positive | None = option(None, "Save and stop before the process is this old (Colab's limit).")
    save_total_size_gb: Positive | None = option(
        None, "Limit on the size of the output folder at any moment, in GB (10^9 bytes)."
    )
    keep_every_epochs: Count | None = option(
        None,
        "Save at the end of every N-th epoch, and keep these beside those of --save_total_limit. Where "
        "--save_total_size_gb has no room, the others go first, then the oldest of these.",
    )
    local_checkpoint_dir: str | None = option(
        None, "Fast folder to save to first; copied to output_dir (a mounted Drive) in the background."
    )


@dataclass(repr=False)
class EvaluatingArguments:
    """How often and on what a run is evaluated, when that ends it, and what its speed and its time are held against."""

    _argument_group_name = "evaluation"

    eval_subset: Positive | None = option(
        None,
        "Rows of each evaluation during training: a count above 1, or a share up to 1.0 (0.05). The same rows every "
        "time, stratified by label and --group_column. A new best is confirmed on all rows.",
    )
    eval_every_epochs: Count | None = option(None, "With --eval_strategy epoch: evaluate after every N-th epoch only.")
    early_stopping_patience: Count | None = option(
        None,
        "Stop after this many evaluations in a row whose interval excludes an improvement of "
        "--early_stopping_min_delta; never in warm-up.",
    )
    early_stopping_min_delta: Annotated[float, NOT_NEGATIVE] = option(
        0.01, "Smallest improvement worth training for, in the unit of the metric."
    )
    baseline_rate: str | None = option(
        None,
        "What the speed is held against: batches per second (it/s) of passes with as many rows, or the folder of a "
        "run, of which rows per second count. In the log after 500 batches, in report and card.",
    )
    dollars_per_hour: list[Positive] = option(
        [], "Price of the machine, for what the run costs; of several --device of hf-ext doctor one price each."
    )


# --- commands that read a model and train nothing --------------------------------------------------------------------


@dataclass
class PredictingArguments:
    """Device, precision, rows at a time, speed-ups, and where embeddings are kept."""

    _argument_group_name = "computing"  # in --help

    use_cpu: bool = option(False, "Compute on the CPU where there is an accelerator.")
    bf16: bool = option(False, "Compute in bfloat16.")
    fp16: bool = option(False, "Compute in float16.")
    per_device_eval_batch_size: Count = option(256, "Rows at a time on each device.")
    embedding_cache_dir: str = option(CACHE_DIR, "Where embeddings of frozen encoders are kept.")
    speedups: list[str] | None = option(
        None, "Speed-ups to use where they fit: names, or 'all'; left out: those that predictions gain from."
    )
    without: list[str] = option([], "Speed-ups to leave out.")
    disable_tqdm: bool = option(False, "Show no progress bars.")

    def __post_init__(self) -> None:
        check_ranges(self)


def training_names() -> set[str]:
    """Names of all training arguments, ours and transformers'."""
    from transformers import TrainingArguments

    kinds = (SpeedArguments, LoraArguments, StepArguments, SavingArguments, EvaluatingArguments)
    return {one.name for kind in (*kinds, TrainingArguments) for one in fields(kind)}
