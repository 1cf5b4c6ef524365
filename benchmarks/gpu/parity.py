"""Every attention back-end on packed rows in half precision: how far from float32, beside transformers' SDPA.

States and gradients of embedded tokens of an encoder with random weights, `hf_ext/speedups/parity.py`'s measure: a
ratio of 1 is SDPA's own rounding noise, above 2 the plan would refuse the kernel. In float32 the ratio says nothing;
there it is the distance from SDPA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import EsmConfig, EsmModel, T5Config, T5EncoderModel

from hf_ext.hardware import detect_hardware
from hf_ext.models.packing import find_encoders, pack_encoders, unpack_encoders
from hf_ext.speedups.attention import PACKED, swaps
from hf_ext.speedups.parity import judge_gradients, judge_states, one_line
from hf_ext.speedups.sample import EncoderSample

from .sides import free_memory
from .work import Work

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "float32": None}
# Those whose errors have been seen to take the CUDA context with them come last.
KERNELS = {
    "cuda": ("sdpa", "padded", "varlen", "flash_attention_2", "faesm", "flex"),
    "cpu": ("sdpa", "padded", "blocked", "flex", "varlen", "flash_attention_2"),
}
LENGTHS = {"full": (160, 100, 512, 61), "toy": (20, 9, 33, 5)}
LOST = ("CUDA error", "cudaError", "CUDNN_STATUS_EXECUTION_FAILED", "device-side assert")


def measure(work: Work) -> None:
    """Reports a row per family, kernel and dtype; of a kernel that does not run here, why."""
    lost = ""
    torch.set_float32_matmul_precision("highest")
    for family in ("esm", "t5"):
        probe = make_probe(family, work)
        exact = _measure(probe, None)
        for name, dtype in DTYPES.items():
            before = exact if dtype is None else _measure(probe, dtype)
            for kernel in KERNELS[work.device.type]:
                problem = lost or why_not(family, kernel, dtype, work.device)
                measured = None if problem else compare(probe, kernel, dtype, exact, before)
                found: dict[str, Any] = measured or {"not_run": problem}
                work.add("rows", {"family": family, "kernel": kernel, "dtype": name, **found})
                if any(word in found.get("failed", "") for word in LOST):
                    lost = f"the CUDA context was lost in {kernel}, {name}"


def why_not(family: str, kernel: str, dtype: torch.dtype | None, device: torch.device) -> str:
    """Of what need not be tried; empty where it is."""
    if kernel == "flex" and device.type == "cpu":
        return "torch has no backward pass of it on a CPU"
    if kernel in ("varlen", "flash_attention_2"):
        if dtype is None:
            return "half precision only"
        if not detect_hardware(device).flash_attention_2:
            return "flash attention needs compute capability 8.0"
    if family == "t5" and kernel not in ("sdpa", "padded", "blocked", "flex"):
        return "T5's bias has no such kernel: another would answer for it"
    return ""


def make_probe(family: str, work: Work) -> EncoderSample:
    """Layers with the heads of ESM-2 650M (T5: of ProtT5's small relatives), and rows of several lengths."""
    torch.manual_seed(0)
    width, heads, layers = (32, 2, 2) if work.is_toy else (1280, 20, 4)
    with torch.device(work.device):
        if family == "esm":
            form = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
            form |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 4 * width}
            sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
            model: Any = EsmModel(EsmConfig(**form, **sizes), add_pooling_layer=False)
        else:
            sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_heads": heads}
            model = T5EncoderModel(T5Config(vocab_size=33, num_layers=layers, dropout_rate=0.0, **sizes))
    (encoder,) = find_encoders(model.eval())
    encoder.set_attn_implementation("sdpa")
    lengths = torch.tensor(LENGTHS[work.size])
    ids = torch.randint(4, 24, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    pad = encoder.config.pad_token_id or 0
    ids = ids.masked_fill(mask == 0, pad)
    return EncoderSample(encoder, {"input_ids": ids.to(work.device), "attention_mask": mask.to(work.device)}, None)


def compare(probe: EncoderSample, kernel: str, dtype: torch.dtype | None, exact: Any, before: Any) -> dict[str, Any]:
    """What the kernel computes beside SDPA; or how it failed."""
    run = replace(probe, autocast=dtype)
    swap, undo = swaps(probe.module, kernel)
    try:
        swap(probe.module)
        if kernel in PACKED:
            pack_encoders(probe.module)
        after = _measure(run, dtype)
        states = judge_states(exact[0], before[0], after[0], run)
        gradients = judge_gradients(exact[1], before[1], after[1], run)
    except ImportError as error:
        return {"not_run": one_line(error)}
    except Exception as error:  # of a kernel of any library
        return {"failed": one_line(error)}
    finally:
        unpack_encoders(probe.module)
        undo()
        free_memory(probe.device)
    problem = states.problem or gradients.problem
    found: dict[str, Any] = {}
    for name, whole, old, new in zip(("noise", "gradient_noise"), exact, before, after):
        found |= {name: _distance(whole, new), f"{name}_of_sdpa": _distance(whole, old)}
    return {**found, **states.evidence(), **gradients.evidence(), "problem": problem}


def _measure(probe: EncoderSample, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        states = probe.states(dtype)
    return states, probe.gradients(dtype)


def _distance(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float(f"{((found - exact).norm() / exact.norm()).item():.3g}")
