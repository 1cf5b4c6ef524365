"""What a changed training argument means for a run that is continued: nothing, or that it becomes another run.

Every field of `FastTrainingArguments` stands in one of the three sets; a test refuses one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Decide which rows make up an optimizer step; harmless together as long as every step takes the same rows.
STEP_SIZE = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})

# A change makes the continuation another run: refused unless allowed.
ANOTHER_RUN = STEP_SIZE | frozenset(
    """
    max_steps num_train_epochs learning_rate encoder_learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    optim optim_ext optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    block_pattern
    average_tokens_across_devices label_smoothing_factor neftune_noise_alpha
    bf16 fp16 tf32 seed data_seed
    accelerator_config parallelism_config fsdp fsdp_config deepspeed
    dataloader_drop_last train_sampling_strategy length_column_name max_tokens_per_batch
    use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora load_in_8bit load_in_4bit
    metric_for_best_model greater_is_better
    """.split()  # noqa: SIM905  readable as a paragraph
)

# No state of the old one fits the new one, so that not even `allow_changed` continues: weights alone could be a start.
OTHER_STATES = frozenset({"optim", "lr_scheduler_type"})

# A change is noted. Some of these act through others (`effective_batch_size` through accumulation, `speedups` through
# the plan), and the result is compared. Kernels and compilation round differently, as another machine does.
HARMLESS = frozenset(
    """
    preset speedups without attention effective_batch_size lr_scaling cached_batch_size
    embedding_cache_dir max_encoder_noise torch_profiler
    baseline_json baseline_batches_per_second baseline_batch_size
    auto_find_batch_size torch_empty_cache_steps
    activation_policy activation_budget_gb
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache use_cpu
    full_determinism remove_unused_columns label_names
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    bf16_full_eval fp16_full_eval load_best_model_at_end
    save_strategy save_steps save_only_model save_on_each_node save_total_limit enable_jit_checkpoint
    save_minutes max_hours keep_epoch_checkpoint save_total_size_gb disk_policy
    local_checkpoint_dir nan_policy oom_policy find_batch_size
    eval_subset eval_every_epochs
    early_stopping_patience early_stopping_min_delta dollars_per_hour
    push_to_hub hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    ignore_data_skip restore_callback_states_from_checkpoint
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    """.split()  # noqa: SIM905  readable as a paragraph
)

# Neither compared nor written into a checkpoint: secrets, and where and how this call was made.
UNRECORDED = frozenset(
    {
        *("hub_token", "output_dir", "local_rank", "do_train", "do_eval", "do_predict"),
        *("resume_from_checkpoint", "resume", "allow_changed"),
    }
)


def is_idle(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a change of an argument has no effect beside the others.

    So for epochs where steps are counted, LoRA's settings without LoRA, what is best where only one of the two runs
    looks for it, the place where an optimizer steps, and which layers are blocks where no optimizer asks.
    """
    both = (before, now)
    if name == "num_train_epochs":
        return all(arguments.get("max_steps", -1) > 0 for arguments in both)
    if name == "block_pattern":  # kernels and pieces follow it too, and change nothing that is learned
        return not any("muon" in _words(arguments.get("optim_ext")) for arguments in both)
    if name == "optim_ext":
        algorithms = [set(_words(arguments.get(name))) - {"cpu_offload"} for arguments in both]
        return algorithms[0] == algorithms[1]
    if name.startswith("lora_") or name in ("use_rslora", "use_dora"):
        return not any(arguments.get("use_peft") for arguments in both)
    if name in ("metric_for_best_model", "greater_is_better"):
        return any(arguments.get("metric_for_best_model") is None for arguments in both)
    return False


def _words(value: Any) -> list[Any]:
    """Those of a list; of what older checkpoints have as one word, that."""
    return value if isinstance(value, list) else [value] if value is not None else []
