"""Muon: the weight matrices of repeated layers get orthogonalized updates, everything else AdamW.

Class L: another optimizer takes another path, so it happens by name alone (`--speedups all muon`). Effect: all
directions of a matrix are learned at the same pace, and optimizer state is one number per matrix weight instead of two.
The learning rate is on AdamW's scale (`match_rms_adamw`), so `--learning_rate`, `--encoder_learning_rate`,
`--weight_decay` and the schedule act as before; AdamW's betas and epsilon apply to the rest. The best rate is another
one, so sweep it: on demo data a new 2-layer model ends, from AdamW's best rate of three, at the same loss; at twice
that rate at half of it; at half that rate far behind (`benchmarks/results/muon_vs_adamw_cpu.json`). Nothing larger was
measured.
Models: any with repeated layers (`models/blocks.py`); `models/muon.py` says what counts as a matrix.
Hardware: any; the iteration is bfloat16, also where training is not, so a chip without it (T4) emulates it.
Cost: five rounds of three matrix products per matrix and step, whatever the batch: little beside a large batch, much
beside a small one (`benchmarks/results/muon_vs_adamw_cpu.json`). bfloat16 also amplifies rounding: two processes end 20
steps of a 2-layer model 1e-5 (rate 1e-4) to 2e-4 (rate 1e-3) from the weights of one process, with AdamW within 1e-6.
Source: torch.optim.Muon; https://kellerjordan.github.io/posts/muon; scaling of the rate: arXiv:2502.16982.
Conflicts: optimizers other than AdamW; LoRA; DeepSpeed and FSDP 1, which hand the optimizer flat slices.
"""

from __future__ import annotations

from ..processes.sharding import fsdp_version
from .base import Context, Decision, Kind, Run, applied, off, optimizer_name, refused

NAME = "muon"
KIND: Kind = "L"
PARTNERS = ("adamw_torch_fused", "adamw_torch")


def decide(context: Context) -> Decision:
    """Applies by name where whole matrices of repeated layers train; anything else is refused."""
    if not context.wants(NAME, KIND):
        return off("not asked for: it changes what is learned")
    problem = _find_problem(context)
    if problem:
        return refused(problem)
    blocks = context.model.blocks or "repeated layers"
    reason = f"{context.model.num_block_matrices} matrices of {blocks} get Muon, the rest AdamW"
    if not context.hardware.native_bf16:
        reason += f"; {context.hardware.name} emulates the bfloat16 that Muon computes in, which takes longer"
    return applied(reason)


def _find_problem(context: Context) -> str | None:
    args, model = context.args, context.model
    optimizer = optimizer_name(args)
    if optimizer not in PARTNERS:
        return f"the rest would need --optim {' or '.join(PARTNERS)}, and --optim {optimizer} was asked for"
    if args.use_peft:
        return "LoRA's factors are no matrices of the model: leave out --use_peft or muon"
    if args.deepspeed_plugin is not None:
        return "ZeRO hands the optimizer flat slices, and with offload its own Adam steps them: use DDP or FSDP2"
    if fsdp_version(args) == 1:
        return "FSDP 1 hands the optimizer flat slices: use FSDP2 (fsdp_version: 2) or DDP"
    if not model.num_parameters:
        return "there is no model yet to find matrices in: pass the model itself instead of model_init"
    if not model.num_block_matrices:
        return "no matrix of a repeated layer trains: let encoders train (--tower_training full), or leave it out"
    return None


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: the optimizer is made when training starts."""
    return decision
