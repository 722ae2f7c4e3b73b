"""The fields of `TrainingArguments`: those that work as in `Trainer`, those without effect, and those refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from pipefit.errors import PipefitError

HONOURED = frozenset(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs use_cache
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id skip_memory_metrics
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    full_determinism seed data_seed use_cpu accelerator_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name do_train do_eval do_predict
    """.split()
)
"""Fields that have the same effect as in a `Trainer` of one process."""

WITHOUT_EFFECT = frozenset(
    """
    average_tokens_across_devices eval_use_gather_object local_rank
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    """.split()
)
"""Fields about several replicas of the model; all processes of a pipeline are one."""

REFUSED: Mapping[str, str] = {
    "fp16": "use bf16",
    "fp16_full_eval": "evaluation computes in the types of the training",
    "bf16_full_eval": "evaluation computes in the types of the training",
    "torch_compile": "`pipefit train --compile` compiles layers",
    "torch_compile_backend": "`pipefit train --compile` compiles layers",
    "torch_compile_mode": "`pipefit train --compile` compiles layers",
    "use_liger_kernel": "its kernels replace the forwards that are split",
    "liger_kernel_config": "its kernels replace the forwards that are split",
    "neftune_noise_alpha": "its hook draws other numbers on every rank",
    "optim_target_modules": "its optimizers need all layers in one process",
    "torch_empty_cache_steps": "",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "save_on_each_node": "all ranks write into one folder",
    "enable_jit_checkpoint": "SIGTERM ends the training after its update; save then",
    "parallelism_config": "give pipeline=Request(…)",
    "fsdp": "give pipeline=Request(…)",
    "fsdp_config": "give pipeline=Request(…)",
    "deepspeed": "give pipeline=Request(…)",
    "debug": "",
}
"""Fields that must keep their defaults, and what to do instead."""

OPTIMIZERS = frozenset(["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"])
"""Values of `optim` whose optimizers update each weight by its own gradient only, with torch's own code."""


def check_arguments(args: TrainingArguments) -> None:
    """Refuses arguments that a pipeline does not honour, all in one message.

    A field that a later version adds is refused unless it has its default.

    Raises:
        PipefitError: there are such arguments; the message names them, and what to do.
    """
    problems = []
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name in HONOURED | WITHOUT_EFFECT or _is_default(field, value):
            continue
        cure = REFUSED.get(field.name, "this version of pipefit does not know it")
        problems.append(_line(field.name, value, cure))
    optimizer = OptimizerNames(args.optim).value
    if optimizer not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        problems.append(_line("optim", optimizer, f"use one of {known}"))
    if problems:
        raise PipefitError("\n".join(["PipelineTrainer does not honour", *problems]))


def _is_default(field: Any, value: Any) -> bool:
    """Returns whether a field has its default, or the empty value that `TrainingArguments` makes of it."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    is_empty = not default and not value
    return is_empty or value == default


def _line(name: str, value: Any, cure: str) -> str:
    text = f"  {name}={value!r:.60}"
    if cure:
        text += f" ({cure})"
    return text
