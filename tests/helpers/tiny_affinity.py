"""Small affinity models on the demo encoders and a tiny T5, and batches for them."""

import torch

from hf_ext.data import DataArguments
from hf_ext.models import AffinityModel, LoraSettings, TowerSpec, read_encoder
from hf_ext.property import build_collator

COLUMNS = ("heavy", "light", "antigen")
ROWS = [
    {"heavy": "EVQLVESGGWYF", "light": "DIQMTQ", "antigen": "MKTAYIAK", "label": 7.0},
    {"heavy": "EVQLVE", "light": "DIQMTQSPPP", "antigen": "MKTAYIAKDDGG", "label": 9.5},
    {"heavy": "EVQLVESGGKKR", "light": "D", "antigen": "IAKDD", "label": 6.25},
    {"heavy": "X", "light": "DIQMTQSP", "antigen": "MKTAYIAKRLL", "label": 8.0},
]
LORA = LoraSettings(r=4, alpha=16, dropout=0.0)


def make_model(folders, training="frozen", inputs=None, pooling="mean", lora=LORA, **settings):
    """A model with one tower per folder, which reads heavy, light, antigen in this order unless `inputs` says more."""
    torch.manual_seed(0)
    inputs = inputs or [[[column]] for column in COLUMNS[: len(folders)]]
    distinct = list(dict.fromkeys(folders))
    specs = [read_encoder(folder, None, training, lora) for folder in distinct]
    towers = [TowerSpec(distinct.index(folder), columns, pooling) for folder, columns in zip(folders, inputs)]
    return AffinityModel.from_encoders(specs, towers, **{"head_sizes": [8], "head_dropout": 0.0, **settings})


def make_batch(model, rows=ROWS, **data_arguments):
    """The collator's batch of `rows` for `model`."""
    return build_collator(model, DataArguments(**data_arguments))(rows)


@torch.no_grad()
def predict(model, batch):
    """Logits in evaluation mode."""
    return model.eval()(**batch).logits


@torch.no_grad()
def shift(model, part=""):
    """Adds 0.05 to every parameter whose name contains `part`; returns how many."""
    chosen = [parameter for name, parameter in model.named_parameters() if part in name]
    for parameter in chosen:
        parameter.add_(0.05)
    return len(chosen)
