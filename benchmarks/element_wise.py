"""What one layer of ESM-2 650M moves through memory beside its products and attention, per token: bytes and kernels.

Forward and backward under autocast to bf16, counted and not timed, so that a CPU can tell: each operation as it stands
in transformers, then what torch's inductor makes of the same layer compiled, as `compile` has it do on a GPU. Attention
is a stand-in that moves nothing, as one kernel for unpadded sequences would be. Weights, whose casts do not grow with
tokens, are left out: of two numbers of tokens the difference counts.

python benchmarks/element_wise.py --output benchmarks/results/element_wise.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, EsmConfig
from transformers.models.esm.modeling_esm import EsmLayer

from hf_ext.speedups.fused_layers import fuse_gelu

WIDTH, HEADS = 1280, 20
TOKENS = (256, 512)
PRODUCTS = ("mm", "addmm", "bmm")
NO_WORK = ("detach", "empty_like", "_unsafe_view", "device")
SIDES = ("as transformers writes it", "with fused_gelu", "compiled", "compiled, with fused_gelu")


@torch.library.custom_op("hf_ext_benchmarks::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stands in for a kernel: output of the right shape."""
    return torch.zeros_like(query)


@torch.library.custom_op("hf_ext_benchmarks::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    """Stands in for its backward pass."""
    return [torch.zeros_like(x) for x in (query, key, value)]


def _fake_gradients(grad: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in rows]


attention.register_fake(lambda query, key, value: torch.empty_like(query))
attention_backward.register_fake(_fake_gradients)
attention.register_autograd(
    lambda ctx, grad: tuple(attention_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def stand_in(module: nn.Module, query: Any, key: Any, value: Any, *others: Any, **settings: Any) -> tuple[Any, None]:
    """The backend: (1, heads, tokens, size) in, (1, tokens, heads, size) out."""
    return attention(*(x.transpose(1, 2)[0] for x in (query, key, value)))[None], None


def make_layer(width: int, heads: int, fused: bool) -> EsmLayer:
    """A layer whose dropout is 0, as ESM-2 has it."""
    AttentionInterface.register("hf_ext_benchmarks", stand_in)
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
    form = {"position_embedding_type": "rotary", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    layer = EsmLayer(EsmConfig(vocab_size=33, attn_implementation="hf_ext_benchmarks", **sizes, **form))
    assert fuse_gelu(layer) == 1 if fused else True
    return layer


def train(layer: EsmLayer, tokens: int) -> None:
    """Forward and backward of a packed row."""
    weight = layer.attention.self.query.weight
    states = torch.randn(1, tokens, weight.shape[1], requires_grad=True)
    rotation = [torch.randn(1, tokens, layer.attention.self.attention_head_size) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(states, position_embeddings=tuple(rotation))
    output = output[0] if isinstance(output, tuple) else output
    torch.autograd.grad(output, [states, *layer.parameters()], torch.ones_like(output))


class Moved(TorchDispatchMode):
    """Adds up what operations read and write: all but products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not (function.is_view or name in PRODUCTS or name in NO_WORK or "attention" in name):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            self.kernels += 1
        return result


def count_eager(width: int, heads: int, fused: bool, tokens: int) -> tuple[int, int]:
    """Bytes and kernels of a layer as it is written, on tensors without memory."""
    with FakeTensorMode():
        layer = make_layer(width, heads, fused)
        with Moved() as moved:
            train(layer, tokens)
    return moved.bytes, moved.kernels


def count_compiled(width: int, heads: int, fused: bool, tokens: int) -> tuple[int, int]:
    """Bytes and kernels of what inductor generates for a layer, calls of libraries left out."""
    from torch._inductor import compile_fx, config, metrics
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    torch.compiler.reset()
    metrics.reset()
    # torch counts only while it would log what it counts.
    with mock.patch.object(compile_fx, "inductor_metrics_log", mock.Mock()), config.patch(fx_graph_cache=False):
        layer = make_layer(width, heads, fused)
        layer.compile(dynamic=False)
        train(layer, tokens)
    generated = [size for node, size in metrics.nodes_num_elem if not isinstance(node, ExternKernelSchedulerNode)]
    return 4 * sum(generated), len(generated)  # torch counts elements of float32


def count(side: str, width: int = WIDTH, heads: int = HEADS) -> dict[str, Any]:
    """Bytes per token and kernels of a layer; see `SIDES`."""
    counted = count_compiled if side.startswith("compiled") else count_eager
    few, many = (counted(width, heads, side.endswith("fused_gelu"), tokens) for tokens in TOKENS)
    return {"side": side, "bytes_per_token": (many[0] - few[0]) / (TOKENS[1] - TOKENS[0]), "kernels": many[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for side in SIDES:
        rows.append(count(side))
        print(json.dumps(rows[-1]), flush=True)
    result = {"torch": torch.__version__, "width": WIDTH, "heads": HEADS, "dtype": "autocast to bfloat16", "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
