"""Small models of every kind that a checkpoint stores, and their state dicts compared bit by bit."""

import math

import peft
import pytest
import torch
from miniature_esm import make_esm
from packaging.version import Version
from peft import LoraConfig, PromptEncoderConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EsmConfig,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_ext.checkpoints.state.weights import load_weights
from hf_ext.errors import CheckpointError
from hf_ext.models.affinity import AffinityModel
from hf_ext.models.configuration import TowerSpec
from hf_ext.models.encoders import read_encoder
from hf_ext.models.lora import LoraSettings, wrap_with_lora

LORA = LoraSettings(r=2)


def esm(cls=EsmForMaskedLM, seed=0, **settings):
    """ESM-2 in miniature from its configuration: 2 layers, 16 wide."""
    return make_esm(cls, seed, **{"num_hidden_layers": 2, **settings})


def t5(cls=T5EncoderModel, seed=0):
    torch.manual_seed(seed)
    return cls(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4))


def bert(seed=0, **settings):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=33, max_position_embeddings=32, **shape, **settings))


def write_bases(folder):
    """Folders of a pretrained ESM and a pretrained T5 encoder."""
    esm().save_pretrained(folder / "esm")
    t5().save_pretrained(folder / "t5")
    return {"esm": str(folder / "esm"), "t5": str(folder / "t5")}


def affinity(bases, training, seed=0, encoders=("esm", "t5"), **settings):
    torch.manual_seed(seed)
    specs = [read_encoder(bases[name], None, training, LORA) for name in encoders]
    towers = [TowerSpec(i, [[column]]) for i, column in zip(range(len(specs)), ("heavy", "antigen"))]
    return AffinityModel.from_encoders(specs, towers, head_sizes=[8], head_dropout=0.0, **settings)


def partly_frozen(bases, seed=0, cls=EsmForMaskedLM, trained="lm_head.dense"):
    """ESM from a base; only modules named `trained` train."""
    torch.manual_seed(seed)
    model = cls.from_pretrained(bases["esm"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def two_adapters(bases, seed=0):
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["query", "value"], use_dora=True)
    model = get_peft_model(EsmForMaskedLM.from_pretrained(bases["esm"]), config)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["key"]))
    return model


def classifier(bases, seed=0):
    """LoRA with a new head: PEFT trains a copy of it and keeps the random original."""
    torch.manual_seed(seed)
    return wrap_with_lora(EsmForSequenceClassification.from_pretrained(bases["esm"]), LORA)


def adapters_and_more(bases, seed=0):
    """LoRA, and a layer of the base that trains beside it."""
    torch.manual_seed(seed)
    model = wrap_with_lora(EsmForMaskedLM.from_pretrained(bases["esm"]), LORA)
    model.base_model.model.lm_head.dense.weight.requires_grad_(True)
    return model


def prompts(bases, seed=0):
    torch.manual_seed(seed)
    config = PromptEncoderConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3, encoder_hidden_size=8)
    return get_peft_model(EsmModel.from_pretrained(bases["esm"]), config)


def injected(bases, seed=0):
    """Adapters put into a transformers model by itself, one of them not active.

    transformers 5.24 does so with peft 0.22 only, which is not out.
    """
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers puts in adapters of peft {MIN_PEFT_VERSION} only")
    model = EsmModel.from_pretrained(bases["esm"])
    torch.manual_seed(seed)
    for name in ("one", "two"):
        model.add_adapter(LoraConfig(r=2, target_modules=["query"]), name)
    model.set_adapter("two")
    return model


class TwoTowers(PreTrainedModel):
    """A user's own model around ESM, without a base model prefix."""

    config_class = EsmConfig

    def __init__(self, config):
        super().__init__(config)
        self.tower = EsmModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 1)
        self.post_init()


class Plain(nn.Module):
    """Tied, strided and overlapping tensors, scalars, NaN, integers and an empty one."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.strided = nn.Parameter(torch.randn(3, 5).t())
        self.rounded = nn.Parameter(torch.randn(4).bfloat16())
        self.register_buffer("scale", torch.tensor(math.nan))
        self.register_buffer("none", torch.zeros(0, 3))
        row = torch.arange(6) + seed
        self.register_buffer("left", row[:4])
        self.register_buffer("right", row[2:])
        self.register_buffer("cache", torch.ones(2), persistent=False)


KINDS = {
    "ESM from its configuration": lambda bases, seed: esm(seed=seed),
    "ESM for classification": lambda bases, seed: esm(EsmForSequenceClassification, seed),
    "ESM from a base": lambda bases, seed: EsmForMaskedLM.from_pretrained(bases["esm"]),
    "ESM partly frozen": partly_frozen,
    "ESM partly frozen, from its configuration": lambda bases, seed: frozen_part(esm(seed=seed)),
    "custom model around ESM": lambda bases, seed: esm(TwoTowers, seed),
    "tied MLM": lambda bases, seed: bert(seed),
    "untied MLM": lambda bases, seed: bert(seed, tie_word_embeddings=False),
    "T5 encoder": lambda bases, seed: t5(seed=seed),
    "T5, tied three times": lambda bases, seed: t5(T5ForConditionalGeneration, seed),
    "affinity, frozen towers": lambda bases, seed: affinity(bases, "frozen", seed),
    "affinity, LoRA towers": lambda bases, seed: affinity(bases, "lora", seed),
    "affinity, full towers": lambda bases, seed: affinity(bases, "full", seed),
    "affinity, T5 tower in full": lambda bases, seed: affinity(bases, "full", seed, encoders=("t5",)),
    "affinity, frozen towers kept": lambda bases, seed: affinity(bases, "frozen", seed, save_full=True),
    "affinity, LoRA towers kept": lambda bases, seed: affinity(bases, "lora", seed, save_full=True),
    "LoRA": lambda bases, seed: wrap_with_lora(EsmForMaskedLM.from_pretrained(bases["esm"]), LORA),
    "LoRA and a new head": classifier,
    "LoRA and more": adapters_and_more,
    "two adapters": two_adapters,
    "prompt tuning": prompts,
    "injected adapters": injected,
    "any module": lambda bases, seed: Plain(seed),
}


def frozen_part(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head.dense" in name)
    return model


def trained(model):
    """The model after "training": every entry that may change has changed."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            changes = tensor.requires_grad or ("lora_" in name) or ("running" in name)
            if changes and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))
    return model


def make(kind, bases, seed=0):
    return KINDS[kind](bases, seed)


def bits(model):
    """Every entry of the state dict as dtype, shape and bytes."""
    return {
        name: (tensor.dtype, tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in model.state_dict().items()
    }


def different(one, other):
    one, other = bits(one), bits(other)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def refused(model, folder, *words):
    """That loading raises, names all `words`, and leaves every bit of the model as it was; returns the message."""
    before = bits(model)
    with pytest.raises(CheckpointError) as error:
        load_weights(model, folder)
    assert bits(model) == before
    for word in words:
        assert word in str(error.value), str(error.value)
    return str(error.value)


def rewrite(file, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def save_bin(model, folder):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
