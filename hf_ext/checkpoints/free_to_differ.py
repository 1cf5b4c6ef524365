"""Arguments that a continued run may have otherwise, with the reason; all others are compared (`compare.py`)."""

from __future__ import annotations

# A new argument is compared. If it may differ, it comes here; `tests/checkpoints/test_compared_arguments.py` asks.
_BY_REASON = {
    "a place or a name": """
        output_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id local_checkpoint_dir
        embedding_cache_dir
    """,
    "shown or logged": """
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
        log_level_replica include_num_input_tokens_seen disable_tqdm report_to debug skip_memory_metrics profile
        baseline_rate dollars_per_hour
    """,
    "evaluates; as in Trainer, an evaluation moves the random numbers after it, which dropout draws": """
        eval_strategy eval_steps eval_delay eval_on_start eval_subset eval_every_epochs per_device_eval_batch_size
        prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics bf16_full_eval fp16_full_eval predict_with_generate generation_max_length
        generation_num_beams generation_config
    """,
    "asks by its name for other rows than those that come next": "ignore_data_skip",
    "says when to stop, not how to train": """
        early_stopping_patience early_stopping_min_delta max_hours nan_policy nan_skip_limit
    """,
    "says what is kept or uploaded": """
        save_strategy save_steps save_minutes save_total_limit save_total_size_gb keep_every_epochs save_only_model
        save_on_each_node enable_jit_checkpoint load_best_model_at_end push_to_hub hub_model_id hub_strategy
        hub_token hub_private_repo hub_always_push hub_revision
    """,
    "is about one session": """
        do_train do_eval do_predict resume resume_from_checkpoint allow_changed
        restore_callback_states_from_checkpoint
    """,
    "the machine, or how it is used": """
        use_cpu local_rank torch_empty_cache_steps dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_static_graph ddp_backend ddp_timeout
        accelerator_config.non_blocking accelerator_config.use_configured_state
    """,
    "computes the same up to last bits": """
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
        torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
        full_determinism attention compile_mode pad_to_multiple_of
    """,
    "acts through batch sizes, the model or speed-ups, which are compared": """
        effective_batch_size cached_batch_size auto_find_batch_size find_batch_size use_peft lora_r lora_alpha
        lora_dropout lora_target_modules lora_kwargs preset speedups without
    """,
    "acts through learning rates, which are compared": "lr_scaling lr_base_batch_size",
    "makes rows, which are compared": """
        dataset_name dataset_config_name dataset_revision streaming id_column bad_rows max_residues too_long
        sequence_columns missing_chains numeric_columns category_columns label_column marker_classes mask_column
        mask_file censor_column group_column task split_column split split_sizes split_seed fold folds cluster_column
        cluster_identity cluster_file max_train_samples filter filter_train max_validation_samples stage
        wild_type mutation_column
        antigen_column heavy_column light_column may_lack_light min_affinity distill_from unlabelled label_hierarchy
    """,
    "makes the model, its loss or its collator, which are compared": """
        model_name_or_path model_revision model_size mlm_probability encoders encoder_revisions embeddings
        tower_inputs tower_training pooling layer max_length head_sizes head_dropout loss save_full architecture size
        objective d_model d_ff hidden_size num_heads num_encoder_layers num_decoder_layers attend dropout
        unknown_affinity_dropout distill_weight distill_temperature focal_gamma class_weights
        antigen_encoder antigen_encoder_revision encoder_training
    """,
    "makes weights to begin with, which a checkpoint has": "init_head_from",
    "acts after training, or beside it": """
        head binder_threshold require stock_trainer temperature top_p discriminator num_epoch_samples num_judged
        num_reproduced affinity_threshold gates num_seeds final_model
    """,
}
FREE_TO_DIFFER = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
