"""Optimizers other than AdamW on the device: Muon for matrices, and any of torch's in host memory."""

from __future__ import annotations

from typing import Any

from accelerate.utils import parse_flag_from_env

from ..memory import MemoryModel, TrainConfig
from ..processes import fsdp_version
from .base import ADAMW, Context, Decision, Speedup, applied, off, optimizer_name, refused


class Muon(Speedup):
    """Muon: the weight matrices of repeated layers get orthogonalized updates, everything else AdamW.

    Class L: another optimizer takes another path, so it happens by name alone (`--speedups all muon`). Effect: all
    directions of a matrix are learned at the same pace, and optimizer state is one number per matrix weight instead of
    two. The learning rate is on AdamW's scale (`match_rms_adamw`), so `--learning_rate`, `--encoder_learning_rate`,
    `--weight_decay` and the schedule act as before; AdamW's betas and epsilon apply to the rest. The best rate is
    another one, so sweep it: on demo data a new 2-layer model ends, from AdamW's best rate of three, at the same loss;
    at twice that rate at half of it; at half that rate far behind (`benchmarks/results/muon_vs_adamw_cpu.json`).
    Nothing larger was measured.
    Models: any with repeated layers (`models/blocks.py`); `models/optimizers.py` says what counts as a matrix.
    Hardware: any; the iteration is bfloat16, also where training is not, so a chip without it (T4) emulates it.
    Cost: five rounds of three matrix products per matrix and step, whatever the batch: little beside a large batch,
    much beside a small one (`benchmarks/results/muon_vs_adamw_cpu.json`). bfloat16 also amplifies rounding: two
    processes end 20 steps of a 2-layer model 1e-5 (rate 1e-4) to 2e-4 (rate 1e-3) from the weights of one process, with
    AdamW within 1e-6.
    Source: torch.optim.Muon; https://kellerjordan.github.io/posts/muon; scaling of the rate: arXiv:2502.16982.
    Conflicts: optimizers other than AdamW; LoRA; DeepSpeed and FSDP 1, which hand the optimizer flat slices.
    """

    NAME = "muon"
    KIND = "L"
    compared = ()
    costs = {"is_muon": True}

    def decide(self, context: Context) -> Decision:
        """Applies by name where whole matrices of repeated layers train; anything else is refused."""
        if not self.wanted(context):
            return off("not asked for: it changes what is learned")
        if problem := _muon_problem(context):
            return refused(problem)
        blocks = context.model.blocks or "repeated layers"
        reason = f"{context.model.num_block_matrices} matrices of {blocks} get Muon, the rest AdamW"
        if not context.hardware.native_bf16:
            reason += f"; {context.hardware.name} emulates the bfloat16 that Muon computes in, which takes longer"
        return applied(reason)


def _muon_problem(context: Context) -> str | None:
    args = context.args
    model = context.model
    optimizer = optimizer_name(args)
    if optimizer not in ADAMW:
        return f"the rest would need --optim {' or '.join(ADAMW)}, and --optim {optimizer} was asked for"
    if args.use_peft:
        return "LoRA's factors are no matrices of the model: leave out --use_peft or muon"
    if args.deepspeed_plugin is not None:
        return "ZeRO hands the optimizer flat slices, and with offload its own Adam steps them: use DDP or FSDP2"
    if fsdp_version(args) == 1:
        return "FSDP 1 hands the optimizer flat slices: use FSDP2 (fsdp_version: 2) or DDP"
    if not model.num_parameters:
        return "there is no model to find matrices in"
    if not model.num_block_matrices:
        return "no matrix of a repeated layer trains: let encoders train (--tower_training full), or leave it out"
    return None


ON_HOST = ("adamw_torch_fused", "adamw_torch", "adafactor", "rmsprop", "adagrad")
CARDS = ("cuda", "rocm")  # with memory of their own

# Those that Trainer takes from bitsandbytes. They step on CPUs too since 0.50, but no weights that FSDP2 has split: its
# kernels have no rule for DTensors.
BITSANDBYTES = frozenset(
    """
    adamw_bnb_8bit adamw_8bit lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit paged_lion_32bit paged_lion_8bit
    ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit
    """.split()  # noqa: SIM905  readable as a paragraph
)


class CpuOffload(Speedup):
    """Optimizer in host memory: ours for torch's optimizers, FSDP2's own where weights are sharded.

    Class I. Effect: the optimizer's states, 8 bytes per trained number with AdamW, leave the card. Each step copies
    weights and gradients to the host, steps there and copies the weights back: after accumulation, averaging over
    processes, clipping and loss scaling, so that all of them act as before.
    With `--speedups all cpu_offload`, around AdamW, Adafactor, RMSprop, Adagrad, and around Muon's hybrid
    (`--speedups all muon cpu_offload`). Under DDP each process steps everything on its host: right, and as many times
    the memory and the work. Checkpoints are those of the optimizer itself: a run goes on with or without the offload.
    With `fsdp_offload_params: true` (accelerate_configs/fsdp2_offload.yaml), weights and gradients live there too; ZeRO
    offloads by its own switch (`--offload_optimizer_device cpu`).
    Hardware: a card with memory of its own. Host memory per process and trained number: 8 bytes, pinned, and the
    states.
    Cost: three copies of 4 bytes per trained number, and the step at the CPU's pace; both are paid once per optimizer
    step, so large batches and accumulation hide them. Muon's matrix products run on the CPU, too, which takes long
    (`benchmarks/results/host_optimizer_cpu.json`). Not measured on a card.
    Conflicts: bitsandbytes and torchao optimizers, whose states stay with their kernels.
    Source: `models/optimizers.py`; ZeRO-Offload, arXiv:2101.06840; torch, `CPUOffloadPolicy` of `fully_shard`.
    """

    NAME = "cpu_offload"
    costs = {"on_host": True}
    group = "states"

    def decide(self, context: Context) -> Decision:
        """Decides: ours on request; FSDP2's is reported where the launcher asked for it.

        What cannot step there is refused.
        """
        args = context.args
        optimizer = optimizer_name(args)
        if context.names(self.NAME):
            if problem := _offload_problem(context, optimizer):
                return refused(problem)
            return applied(_describe(context, optimizer), {"by": "host"})
        if _fsdp_offloads(args):
            if optimizer in BITSANDBYTES:
                reason = f"--optim {optimizer} (bitsandbytes) cannot step weights that FSDP2 has split"
                return refused(f"{reason}: use --optim adamw_torch_fused, or no fsdp_offload_params")
            return applied(f"FSDP2 keeps weights, gradients and the states of {optimizer} on the host", {"by": "fsdp"})
        return off("not asked for by its name")

    def saves_memory(self, memory: MemoryModel, config: TrainConfig) -> bool:
        """Returns whether a card holds AdamW's states."""
        return memory.kind != "cpu" and memory.has_large_states(config)


def _describe(context: Context, optimizer: str) -> str:
    has_muon = context.names("muon")
    stepped = "Muon and AdamW step in host memory: their" if has_muon else f"{optimizer} steps in host memory: its"
    reason = f"{stepped} states leave {context.hardware.name}"
    if has_muon:
        reason += "; Muon's matrix products are slow on a CPU"
    if context.world_size > 1:
        reason += f"; each of {context.world_size} processes keeps all states there"
    return reason


def _offload_problem(context: Context, optimizer: str) -> str | None:
    args = context.args
    if optimizer == "sgd":
        return "--optim sgd keeps at most momentum, too little to move: leave cpu_offload out"
    if optimizer not in ON_HOST:
        return f"--optim {optimizer} was not tried in host memory: use --optim {' or '.join(ON_HOST)}"
    if args.deepspeed_plugin is not None:
        return "ZeRO offloads by its own switch: use accelerate launch --offload_optimizer_device cpu instead"
    if args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return "FSDP2 offloads by its own switch: use accelerate_configs/fsdp2_offload.yaml instead"
    if context.hardware.kind not in CARDS:
        return f"for cards with memory of their own; on {context.hardware.name} there is nothing to gain: leave it out"
    return None


def _fsdp_offloads(args: Any) -> bool:
    """Tells whether FSDP offloads, by Trainer's own arguments or by what accelerate's launcher left."""
    if args.fsdp_plugin_args is not None:
        return bool(args.fsdp_plugin_args.get("cpu_offload"))
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("FSDP_OFFLOAD_PARAMS")
