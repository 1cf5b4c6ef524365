"""flash-attn's functions that faesm and we import, in plain torch, so that such code runs where no GPU is.

They have the signatures of flash-attn 2.8, follow its documented contracts and check the shapes and dtypes that it
checks; they say nothing about its kernels' speed or rounding. `tests/models/test_flash_attn_source.py` holds them
against flash-attn's own source.
"""

import importlib.machinery
import sys
import types

import pytest
import torch

from hf_ext.optional import import_problem


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """(n, tokens, ...) and (n, tokens) -> (all real tokens, ...), their flat indices, ends, longest, counts."""
    assert unused_mask is None
    counts = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    return hidden_states.flatten(0, 1)[indices], indices, ends, int(counts.max()), counts


def pad_input(hidden_states, indices, batch, seqlen):
    """(all real tokens, ...) -> (batch, seqlen, ...), zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


def apply_rotary(
    x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False
):
    """Rotates (all tokens, heads, head) in place; row i of the tables is the i-th token of a sequence."""
    assert (seqlen_offsets, interleaved, inplace) == (0, False, True)
    assert cos.shape == sin.shape == (cos.shape[0], x.shape[-1] // 2)
    assert cos.dtype == sin.dtype == x.dtype
    assert len(cos) >= max_seqlen
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        c, s = cos[: end - start, None], sin[: end - start, None] * (-1 if conjugate else 1)
        first, second = x[start:end].chunk(2, dim=-1)
        x[start:end] = torch.cat([first * c - second * s, first * s + second * c], dim=-1)
    return x


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """(all tokens, 3, heads, head) -> (all tokens, heads, head); every sequence attends to itself."""
    assert cu_seqlens.dtype == torch.int32
    assert (dropout_p, causal, window_size, softcap, alibi_slopes) == (0.0, False, (-1, -1), 0.0, None)
    assert not return_attn_probs
    segments = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        assert end - start <= max_seqlen
        query, key, value = qkv[start:end].unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * softmax_scale
        segments.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(segments)


# fmt: off
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None
):
    """The same of three tensors, (all tokens, heads, head); in half precision alone, as its kernels are."""
    assert (q.dtype, max_seqlen_q, cu_seqlens_q) == (torch.bfloat16, max_seqlen_k, cu_seqlens_k)
    qkv = torch.stack([q, k, v], 1)
    return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens_q, max_seqlen_q, dropout_p, softmax_scale, causal)
# fmt: on


UNUSED = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
UNUSED += ("flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache")
OURS = {"flash_attn_varlen_func": flash_attn_varlen_func}  # and what faesm imports, which never calls it
# Module -> what is imported from it; None where it is never called for ESM.
CONTENTS = {
    "flash_attn": dict.fromkeys(UNUSED) | OURS | {"flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func},
    "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": unpad_input},
    "flash_attn.flash_attn_interface": {"_get_block_size_n": None},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": None},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary},
}


@pytest.fixture
def flash(monkeypatch):
    """Puts these functions where faesm looks for flash-attn, and a device where it asks for one; faesm is new to it."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "faesm"}
    import_problem.cache_clear()
    for name, names in CONTENTS.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "faesm"]:
        del sys.modules[name]
    sys.modules.update(known)
    import_problem.cache_clear()
