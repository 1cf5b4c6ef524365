"""Small encoders of each packed family with random weights, padded batches, and what two ways to compute differ in."""

from functools import partial

import torch
from closeness import largest, relative_error
from miniature_esm import MASK, NO_DROPOUT, PAD, make_wide_esm
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EsmcConfig,
    EsmcForMaskedLM,
    EsmForMaskedLM,
    EsmModel,
    T5Config,
    T5EncoderModel,
)

from hf_ext.models import PREFIX, pack_encoders, register_attention

LENGTHS = (9, 4, 6, 4)


def tiny_esm(head=EsmForMaskedLM, **settings):
    """ESM-2 in miniature, 32 wide, 2 layers, token dropout on; `head` is any of transformers' ESM classes."""
    options = {name: settings.pop(name) for name in ("add_pooling_layer",) if name in settings}
    return _with_biases(make_wide_esm(partial(head, **options), **{"max_position_embeddings": 40, **settings}))


def tiny_esmc(head=EsmcForMaskedLM, **settings):
    """ESM C in miniature, 32 wide, 2 layers, residues' scale of two of 36 layers; `head` as of `tiny_esm`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _with_biases(head(EsmcConfig(**{**sizes, "initializer_range": 0.2, "classifier_dropout": 0.0, **settings})))


def tiny_bert(head=BertForMaskedLM, **settings):
    """BERT in miniature, 32 wide, 2 layers, no dropout; `head` as of `tiny_esm`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 33, "pad_token_id": PAD, "max_position_embeddings": 40, "initializer_range": 0.2}
    options = {name: settings.pop(name) for name in ("add_pooling_layer",) if name in settings}
    return _with_biases(head(BertConfig(**{**sizes, **NO_DROPOUT, **settings}), **options))


def _with_biases(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0, and padding, which starts at 0 too, would stay there unseen
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tiny_t5(**settings):
    """A T5 encoder in miniature, 32 wide, 2 layers; 8 buckets of distances up to 8, so that rows differ in theirs."""
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 33,
        "pad_token_id": PAD,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 8,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    }
    return T5EncoderModel(T5Config(**{**defaults, **settings}))


def make_batch(lengths=LENGTHS, left=False, masked=True, seed=0):
    """Token ids and attention mask, (sequences, longest), padded right or left; the second token of each is masked."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    places = torch.arange(width).flip(0) if left else torch.arange(width)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 24, mask.shape, generator=generator)
    if masked:
        ids[:, -2 if left else 1] = MASK
    return {"input_ids": ids.where(mask.bool(), torch.tensor(PAD)), "attention_mask": mask}


def use_kernel(model, kernel="blocked"):
    """`model` with one of hf_ext's attention kernels."""
    register_attention()
    model.set_attn_implementation(PREFIX + kernel)
    return model


def packed(model, kernel="blocked", round_up=False):
    """`model` with packed encoders and one of hf_ext's attention kernels."""
    assert pack_encoders(use_kernel(model, kernel), round_up) == 1
    return model


def real_outputs(model, batch):
    """What a model computes for real tokens, one after the other: states or logits, and what it pools."""
    output = model(**batch)
    named = {name: output.get(name) for name in ("last_hidden_state", "logits", "pooler_output")}
    keep = batch["attention_mask"].bool()
    return {name: x[keep] if x.dim() == 3 else x for name, x in named.items() if x is not None}


def one_by_one(model, batch):
    """As `real_outputs`, with each sequence alone and without padding."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool()):
        alone = ids[mask][None]
        rows.append(real_outputs(model, {"input_ids": alone, "attention_mask": torch.ones_like(alone)}))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def without_empty_rows(model, batch):
    """As `real_outputs`, without rows that have no token: transformers' token dropout divides by their zero tokens."""
    keep = batch["attention_mask"].any(1)
    return real_outputs(model, {name: x[keep] for name, x in batch.items()})


def states_and_gradients(model, batch, compute=real_outputs):
    """Outputs, and the gradient of a loss on all of them for every parameter that has one."""
    model.zero_grad()
    outputs = compute(model, batch)
    # A sum of squares is constant after a LayerNorm, so every output gets a weight of its own.
    sum((x * torch.arange(1.0, x.numel() + 1).sin().view_as(x)).sum() for x in outputs.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in outputs.items()}, gradients


def largest_error(model, twin, batch, compute=real_outputs):
    """How far `model` is from `twin`, which computes as `compute` says, in outputs and in gradients."""
    (outputs, gradients), (expected, expected_gradients) = (
        states_and_gradients(model, batch),
        states_and_gradients(twin, batch, compute),
    )
    return largest([relative_error(outputs, expected), relative_error(gradients, expected_gradients)])


def esm_encoder(**settings):
    return tiny_esm(EsmModel, add_pooling_layer=False, **settings)
