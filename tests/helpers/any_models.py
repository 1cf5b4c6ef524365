"""Small models of many architectures from their configurations, and modules made by hand; none is of proteins."""

import torch
import transformers
from torch import nn

SHAPE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
SEQ2SEQ = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "vocab_size": 40}
SEQ2SEQ |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
SEQ2SEQ |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {"image_size": 16, "patch_size": 8}


def bert(**settings):
    config = transformers.BertConfig(**{**SHAPE, "vocab_size": 40, **settings})
    return transformers.BertForSequenceClassification(config)


def vit(**settings):
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**SHAPE, **IMAGE, **settings}))


def gpt2(**settings):
    shape = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **ENDS, **settings}))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, vocab_size=40))


def mixtral():
    experts = {"num_key_value_heads": 2, "num_local_experts": 3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, **experts, vocab_size=40))


def t5():
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, vocab_size=40))


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ, **ENDS))


def swin():
    stages = {"embed_dim": 8, "depths": [2, 3], "num_heads": [1, 2], "window_size": 4}
    return transformers.SwinForImageClassification(transformers.SwinConfig(image_size=32, patch_size=4, **stages))


def albert():
    return transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(**SHAPE, embedding_size=8, vocab_size=40)
    )


def resnet():
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**shape))


def clip():
    sides = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config={**sides, "vocab_size": 40}, vision_config={**sides, **IMAGE})
    )


class Layer(nn.Module):
    """A residual feed-forward layer with dropout."""

    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A plain module: a stem, layers in a trunk, a head, and a loss where there are labels."""

    def __init__(self, trunk=None, width=8):
        super().__init__()
        self.stem, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.trunk = nn.Sequential(*(Layer(width) for _ in range(4))) if trunk is None else trunk

    def forward(self, x, labels=None):
        logits = self.head(self.trunk(self.stem(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Attributes(nn.Module):
    """Layers as attributes under numbered names, beside two that only look alike."""

    def __init__(self):
        super().__init__()
        self.block1, self.block2, self.block3 = Layer(), Layer(), Layer()
        self.left, self.right = Layer(), Layer()

    def forward(self, x):
        return self.left(self.block3(self.block2(self.block1(x)))) + self.right(x)


class Listed(nn.Module):
    """Modules in a container, to look at."""

    def __init__(self, **containers):
        super().__init__()
        for name, container in containers.items():
            setattr(self, name, container)


def rows_of_numbers(num=24, seed=0):
    """Rows for `Net`."""
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(5, generator=generator), "labels": i % 3} for i in range(num)]


def rows_of_tokens(num=24, length=10, labels="class", seed=0):
    """Rows of `length` tokens: with a class, or the tokens themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(num):
        ids = torch.randint(3, 40, (length,), generator=generator)
        rows.append({"input_ids": ids, "labels": i % 2 if labels == "class" else ids})
    return rows


def rows_of_images(num=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": i % 2} for i in range(num)]


TRAINED = {
    "BERT": (bert, rows_of_tokens),
    "ViT": (vit, rows_of_images),
    "GPT-2": (gpt2, lambda: rows_of_tokens(labels="tokens")),
    "plain module": (Net, rows_of_numbers),
}
