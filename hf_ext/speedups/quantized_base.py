"""Frozen weights beside LoRA adapters in 8 or 4 bits (QLoRA): 1 or 0.56 bytes each instead of 4.

Class N. Effect: with `--load_in_8bit` or `--load_in_4bit` (nf4) the frozen linear layers of encoders that have adapters
are stored in bitsandbytes' codes and dequantised at each use, forward and backward. Adapters, heads, norms, embeddings
and losses stay in float32, and autocast acts as before. Activations are as large as without: checkpoint those first.
Hardware: any that bitsandbytes 0.50 runs on; CPUs too. The model is in memory in float32 once, on the CPU, before.
Evidence: bytes saved; of a layer of each shape, the relative error of outputs and of gradients, measured in training
after an evaluation. A layer whose gradient is lost, or off by more than half, ends the run before it begins.
Cost: dequantising every layer in each forward and backward pass: encoding in 8 bits ran at 0.5 to 0.65 of its speed
beside other work on a CPU (`benchmarks/results/eight_bit.json`). Source: QLoRA, arXiv:2305.14314; LLM.int8; see
`hf_ext/models/quantization.py` for what is bitsandbytes' and what is not.
Conflicts: full fine-tuning; DoRA, whose norms are taken from the weights; `--save_full`; FSDP and ZeRO, which split
weights, and split frozen ones too. Codes are never written: checkpoints and exports hold adapters, which a base in
float32 takes as well (predictions then differ by what the codes round), and merging reads the float weights again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import nn

from ..checkpoints.weights import keep_source_digests
from ..models.affinity import AffinityModel
from ..models.blocks import find_blocks
from ..models.lora import has_adapters
from ..models.quantization import (
    QuantizedLinear,
    find_frozen_layers,
    measure_error,
    quantize_linear_layers,
    quantized_layers,
)
from ..processes import fsdp_version
from .base import Context, Decision, Kind, Run, applied, are_weights_split, refused, skipped

NAME = "quantized_base"
KIND: Kind = "N"
MAX_GRADIENT_ERROR = 0.5  # 4 bits are off by about a tenth, a lost gradient by 1


def asked_bits(args: Any) -> int | None:
    """What `--load_in_8bit` and `--load_in_4bit` ask for; None without either."""
    return 8 if args.load_in_8bit else 4 if args.load_in_4bit else None


def asked_flag(args: Any) -> str:
    """The flag behind `asked_bits`."""
    return f"--load_in_{asked_bits(args)}bit"


def decide(context: Context) -> Decision:
    """Applies on request to models with adapters that are whole on each device; what trains in full is refused."""
    bits = asked_bits(context.args)
    if bits is None:
        return context.unasked(NAME, "give --load_in_8bit or --load_in_4bit: it changes the numbers")
    if context.args.load_in_8bit and context.args.load_in_4bit:
        return refused("--load_in_8bit and --load_in_4bit: give one of the two")
    if context.model.frozen_inputs and not context.model.trains_encoders:
        return skipped("no encoder trains: encoder_precision stores them so")
    problem = _find_problem(context)
    if problem:
        return refused(problem)
    return applied(f"frozen layers beside adapters in {bits} bits", {"bits": bits})


def _find_problem(context: Context) -> str | None:
    args, flag = context.args, asked_flag(context.args)
    if NAME in (args.without or []):
        return f"{flag} and --without {NAME} contradict each other: keep one"
    if not (args.use_peft or context.model.has_adapters):
        return f"{flag}: all weights train, which codes cannot: give --use_peft, or keep encoders frozen"
    if args.use_dora:
        return f"{flag}: DoRA takes norms of the frozen weights: leave out one of the two"
    if are_weights_split(args) or fsdp_version(args) is not None:
        return f"{flag}: FSDP and ZeRO split frozen weights over the processes instead: leave it out, or use DDP"
    return context.replicas


def apply(decision: Decision, run: Run) -> Decision:
    """Quantises the base of `run.model`, once a layer of each shape has shown that its gradient arrives.

    Raises:
        MissingDependencyError: no bitsandbytes that works here.
        ArgumentError: weights that bitsandbytes cannot take.
    """
    bits = decision.settings["bits"]
    problem = _find_problem_of(run.model)
    if problem:
        return replace(decision, status="refused", reason=f"--load_in_{bits}bit: {problem}")
    blocks = find_adapted_blocks(run.model)
    layers = [layer for block in blocks for _, layer in find_frozen_layers(block)]
    one_of_each = {tuple(layer.weight.shape): layer for layer in layers}
    errors = {shape: measure_error(layer, QuantizedLinear(layer, bits)) for shape, layer in one_of_each.items()}
    for shape, error in errors.items():
        if not error["gradient"] <= MAX_GRADIENT_ERROR:  # a NaN too
            reason = (
                f"in {bits} bits the gradient of a layer of {shape[0]} x {shape[1]} is off by {error['gradient']:.0%}"
            )
            return replace(decision, status="refused", reason=f"{reason}: leave out --load_in_{bits}bit")
    if isinstance(run.model, PeftModel):
        keep_source_digests(run.model)
    before = sum(layer.weight.nbytes for layer in layers)
    for block in blocks:
        quantize_linear_layers(block, bits)
    stored = quantized_layers(run.model).values()
    saved = before - sum(layer.weight.nbytes + layer.scales.nbytes for layer in stored)
    evidence = {
        "layers": len(stored),
        "bytes_saved": saved,
        "layer_error": round(max(error["output"] for error in errors.values()), 4),
        "gradient_error": round(max(error["gradient"] for error in errors.values()), 4),
    }
    reason = f"{decision.reason}: {saved / 2**20:.1f} MiB less of weights"
    return replace(decision, reason=reason).with_evidence(**evidence)


def find_adapted_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of encoders that have adapters."""
    return [block for block in find_blocks(model) if has_adapters(block)]


def _find_problem_of(model: Any) -> str | None:
    if not isinstance(model, PeftModel | AffinityModel):
        return f"{type(model).__name__} has adapters of its own making, and would be saved with codes: give --use_peft"
    if getattr(model.config, "save_full", False):
        return "--save_full keeps the weights that are saved in float32: leave out one of the two"
    if any(getattr(module, "lora_magnitude_vector", None) for module in model.modules()):
        return "DoRA takes norms of the frozen weights: train without it"
    if not any(True for block in find_adapted_blocks(model) for _ in find_frozen_layers(block)):
        return "no frozen linear layer stands beside an adapter: leave it out"
    return None
