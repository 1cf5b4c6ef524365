"""Models on torch's meta device and batches for them, for the memory ledger."""

import torch
from miniature_esm import NO_DROPOUT
from transformers import BertConfig, BertModel, EsmConfig, EsmForMaskedLM, T5Config, T5EncoderModel

from hf_ext.memory import MemoryModel, masked_lm_batch
from hf_ext.memory.fakes import LayerSlice
from hf_ext.models import LoraSettings, block_lists, pack_encoders, wrap_with_lora
from hf_ext.speedups.attention import set_attention

# Width, heads, layers of the published checkpoints.
SHAPES = {"650M": (1280, 20, 33), "3B": (2560, 40, 36), "15B": (5120, 40, 48)}
TINY = (32, 2, 6)


def make_model(shape=TINY, training="full", device="meta", family="esm", attention="sdpa", packed=False):
    """ESM-2 with its masked-LM head, or the encoder of another family, of (width, heads, layers)."""
    width, heads, layers = shape
    common = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    common |= {"intermediate_size": 4 * width, "vocab_size": 33, "pad_token_id": 1, **NO_DROPOUT}
    torch.manual_seed(0)
    with torch.device(device):
        if family == "esm":
            rotary = {"position_embedding_type": "rotary", "mask_token_id": 32, "token_dropout": True}
            model = EsmForMaskedLM(EsmConfig(**common, **rotary, max_position_embeddings=1026))
            model.esm.contact_head.requires_grad_(False)
        elif family == "bert":
            model = BertModel(BertConfig(**common), add_pooling_layer=False)
        else:
            sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 2 * width, "num_heads": heads}
            config = T5Config(vocab_size=33, num_layers=layers, dropout_rate=0.0, pad_token_id=1, **sizes)
            model = T5EncoderModel(config)
        model.set_attn_implementation(attention)
        if training == "lora":
            model = wrap_with_lora(model, LoraSettings(r=4))
        elif training == "frozen":
            model.base_model.requires_grad_(False)
    if packed:
        set_attention(model, "padded")
        pack_encoders(model)
    return model.train()


def make_subject(model, length=16, kind="cuda", labelled=True, **settings):
    """`model` and rows of `length` tokens."""

    def make_batch(rows):
        batch = masked_lm_batch(length, False, rows)
        return batch if labelled else {name: batch[name] for name in ("input_ids", "attention_mask")}

    return MemoryModel(model, make_batch, kind, **settings)


def keep_whole(subject):
    """`subject`, with every layer computed: what the extrapolation has to equal."""
    subject.slices = [LayerSlice(layers, len(layers)) for layers in block_lists(subject.model).values()]
    subject.scales = False
    return subject
