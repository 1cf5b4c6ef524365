"""What libraries do wrong or lack, and code of ours stands in for: a test that fails says which of it may go."""

import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from miniature_esm import make_narrow_esm, make_wide_esm
from packaging.version import Version
from protein_families import FAMILIES, MASKED_LMS
from tiny_encoders import make_batch, tiny_esm, tiny_esmc
from token_rows import stack_rows
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import EsmModel, Trainer, TrainingArguments
from transformers.models.esm.modeling_esm import EsmIntermediate

ROOT = Path(__file__).resolve().parent.parent
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


class Operations(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_esm_computes_its_gelu_in_several_operations():
    """Else `speedups/fused_gelu.py` may go."""
    layer = EsmIntermediate(make_wide_esm().config)
    with Operations() as seen:
        layer(torch.randn(1, 3, 32))
    assert "erf" in seen.names
    assert "gelu" not in seen.names


def test_a_resumed_esm_of_stock_trainer_loses_its_layer_norms(tmp_path):
    """Else `save_original_format=False` may go (checkpoints/weights.py, models/towers.py)."""
    rows = datasets.Dataset.from_dict({"input_ids": [[4, 5, 6, 7]] * 4, "labels": [0.5] * 4})

    def trainer(folder, **given):
        args = TrainingArguments(str(tmp_path / folder), max_steps=2, save_steps=1, learning_rate=0.1, **QUIET, **given)
        return Trainer(make_narrow_esm(), args, stack_rows, rows)

    trained = trainer("whole")
    trained.train()
    resumed = trainer("whole")
    resumed._load_from_checkpoint(str(tmp_path / "whole" / "checkpoint-2"))
    lost = [
        name
        for name, weight in resumed.model.named_parameters()
        if not torch.equal(weight, dict(trained.model.named_parameters())[name])
    ]
    assert lost
    assert all("LayerNorm" in name for name in lost)


def test_predictions_of_stock_trainer_leave_the_order_of_the_data_where_rows_are_grouped_by_length(tmp_path):
    """Else `in_order` may go (training/loaders.py)."""
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[4] * n for n in (3, 9, 5, 7)], "labels": [float(n) for n in (3, 9, 5, 7)]}
    )
    args = TrainingArguments(
        str(tmp_path), train_sampling_strategy="group_by_length", per_device_eval_batch_size=1, **QUIET
    )
    labels = Trainer(make_narrow_esm(), args, stack_rows, eval_dataset=rows).predict(rows).label_ids
    assert np.ravel(labels).tolist() != [3.0, 9.0, 5.0, 7.0]


def oldest(package: str) -> Version:
    """The lowest version that setup.py allows."""
    return Version(re.search(rf'"{package}>=([\d.]+)', (ROOT / "setup.py").read_text())[1])


def test_torch_counts_no_flops_of_attention_on_cpus():
    """Else `flop_counter` of `models/kernels/blocked_attention.py` may go. torch 2.15 counts them."""
    assert oldest("torch") < Version("2.15")
    if Version(torch.__version__) >= Version("2.15"):
        return
    query = torch.randn(1, 2, 8, 4)
    with FlopCounterMode(display=False) as counted:
        scaled_dot_product_attention(query, query, query)
    assert counted.get_total_flops() == 0


@pytest.mark.parametrize("make", [tiny_esm, tiny_esmc])
def test_packed_rows_leak_in_transformers(make):
    """Else `run_esm` and its like may go: with the usual names of packed inputs, sequences see each other."""
    model = make(EsmModel, add_pooling_layer=False) if make is tiny_esm else make().esmc
    ids = make_batch((4, 5), masked=False)["input_ids"]
    rows = [ids[0, :4], ids[1, :5]]
    alone = torch.cat([model(row[None]).last_hidden_state[0] for row in rows])
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    places = torch.cat([torch.arange(4), torch.arange(5)])[None]
    together = model(torch.cat(rows)[None], position_ids=places, **names).last_hidden_state[0]
    assert (alone - together).abs().max() > 0.1


DIVIDES = ("esmc", "modernbert")


@pytest.mark.parametrize("name", MASKED_LMS)
def test_which_losses_divide_by_the_items_of_the_whole_batch(name):
    """What `models/losses.py` says of them."""
    torch.manual_seed(0)
    model = FAMILIES[name][0]().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    once, twice = (model(input_ids=ids, labels=ids, num_items_in_batch=count).loss for count in (4, 8))
    divides = torch.allclose(once, 2 * twice)
    assert divides == (name in DIVIDES)
