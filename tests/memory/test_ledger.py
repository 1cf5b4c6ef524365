"""The ledger: what a pass without memory says is what real passes, real optimizers and whole models hold."""

import pytest
import torch
from any_models import Layer, Net, gpt2
from inside import BLOCK_BYTES, OTHER, Ledger, record_pass
from ledger_subjects import keep_whole, make_model, make_subject
from torch import nn
from torch.nn import functional
from transformers.optimization import Adafactor

from hf_ext.memory import MemoryModel, TrainConfig, optimizer_bytes
from hf_ext.memory.fakes import autocast_rule
from hf_ext.memory.probe import GRADIENTS, WEIGHTS
from hf_ext.memory.stored import gradient_bytes, weight_bytes
from hf_ext.models import find_base_layers, recompute

pytestmark = pytest.mark.internals


def test_a_linear_layer_takes_its_output():
    layer, inputs = nn.Linear(100, 200), torch.zeros(64, 100)
    with Ledger() as ledger, torch.no_grad():
        ledger.know(layer.parameters())
        ledger.know([inputs], OTHER)
        output = layer(inputs)
    # Weight 100 x 200 x 4 = 80,000 -> 80,384; bias 800 -> 1,024; inputs 64 x 100 x 4 = 25,600; output 64 x 200 x 4.
    assert ledger.current[WEIGHTS] == 80_384 + 1_024
    assert ledger.current[OTHER] == 25_600 + 51_200
    assert max(others + gradients for others, _, gradients in ledger.levels) == 81_408 + 76_800
    assert output.shape == (64, 200)


def test_what_autograd_keeps_counts_until_the_backward_pass():
    weight = nn.Parameter(torch.zeros(128))
    with Ledger() as ledger:
        ledger.know([weight])
        loss = (weight.exp() * 2).sum()  # keeps the exponential, not the product
        kept = ledger.current[OTHER]
        loss.backward()
        ledger.know([weight.grad], GRADIENTS)
        del loss
    assert kept == 512 + 512  # the exponential, and the loss
    assert ledger.current == {WEIGHTS: 512, GRADIENTS: 512, OTHER: 0}


# 100 x 64 x 4 = 25,600 of a table; 128 x 64 = 8,192 numbers of a matrix; 128 of its bias, too few for 8 bits.
TABLE, MATRIX, BIAS = 6400, 8192, 128


def small_model():
    return nn.ModuleDict({"table": nn.Embedding(100, 64), "layer": nn.Linear(64, 128)})


def test_weights_gradients_and_two_states_of_adamw():
    model = small_model()
    assert weight_bytes(model) == gradient_bytes(model) == 4 * (TABLE + MATRIX + BIAS)
    assert optimizer_bytes(model, "adamw_torch_fused") == (8 * (TABLE + MATRIX + BIAS), 0)
    model["table"].requires_grad_(False)
    assert gradient_bytes(model) == 4 * (MATRIX + BIAS)
    assert optimizer_bytes(model, "adamw_torch") == (8 * (MATRIX + BIAS), 4 * (MATRIX + BIAS))


def state_bytes(optimizer):
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor) and tensor.numel() > 1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw_torch_fused", lambda weights: torch.optim.AdamW(weights, fused=True)),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("sgd", torch.optim.SGD),
        ("adafactor", lambda weights: Adafactor(weights, relative_step=False, scale_parameter=False, lr=1e-3)),
    ],
)
def test_the_formula_is_what_the_optimizer_keeps(name, make):
    model = small_model()
    optimizer = make([*model.parameters()])
    (model["table"].weight.sum() + model["layer"].weight.sum() + model["layer"].bias.sum()).backward()
    optimizer.step()
    assert state_bytes(optimizer) == optimizer_bytes(model, name)[0]


def test_a_frozen_base_in_half_precision_takes_half():
    model = make_model((64, 2, 2), "lora")
    layers = find_base_layers(model)
    size = sum(layer.weight.numel() for layer in layers)
    assert size == 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert weight_bytes(model) - weight_bytes(model, layers) == 2 * size


ROUNDING = 64 * BLOCK_BYTES  # tensors that live at once, each rounded for its own number of rows

AGAIN = (False, True, "attention", "feed_forward", "layers")
CONFIGS = [TrainConfig(5, recomputes, half) for recomputes in AGAIN for half in (False, True)]


def peaks(subject, config):
    timeline = subject.timeline(config)
    return timeline.peak(), timeline.peak(standing=10**6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_three_layers_give_the_peak_of_the_whole_model(config):
    model = make_model()
    cut = make_subject(model, scales=False)
    assert peaks(cut, config) == peaks(keep_whole(make_subject(model)), config)
    assert any(repeat.copies > 1 for repeat in cut.timeline(config).repeats)


REAL = {
    "full": ({}, TrainConfig(5)),
    "full, bf16": ({}, TrainConfig(5, half=True)),
    "recomputing": ({}, TrainConfig(5, True, half=True)),
    "recomputing every second": ({}, TrainConfig(5, True, every_n_layers=2)),
    "recomputing attention": ({"family": "t5"}, TrainConfig(5, "attention")),
    "recomputing feed-forward": ({}, TrainConfig(5, "feed_forward")),
    "recomputing every third": ({}, TrainConfig(5, "layers", half=True, every_n_layers=3)),
    "LoRA": ({"training": "lora"}, TrainConfig(5, half=True)),
    "frozen": ({"training": "frozen"}, TrainConfig(5)),
    "eager": ({"attention": "eager"}, TrainConfig(5)),
    "T5": ({"family": "t5"}, TrainConfig(5)),
    "BERT": ({"family": "bert"}, TrainConfig(5, half=True)),
}


def recompute_as(config, model):
    if config.recomputes is True:
        model.activation_checkpointing_enable(every_n_layers=config.every_n_layers)
    elif config.recomputes:
        recompute(model, config.recomputes, config.every_n_layers)


def test_each_nth_layer_lies_between_all_layers_and_none_and_no_layer_stands_for_another():
    counted = [
        sum(make_subject(make_model()).timeline(TrainConfig(5, recomputes, every_n_layers=every)).peak())
        for recomputes, every in ((False, 1), ("layers", 3), ("layers", 2), ("layers", 1))
    ]
    assert counted == sorted(counted, reverse=True)
    assert len({*counted}) == 4
    assert not make_subject(make_model()).timeline(TrainConfig(5, "layers", every_n_layers=2)).repeats


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", REAL)
def test_fake_tensors_hold_what_real_ones_hold(name):
    settings, config = REAL[name]
    labelled = settings.get("family", "esm") == "esm"
    subject = make_subject(make_model(**settings), kind="cpu", labelled=labelled)
    model = make_model(device="cpu", **settings)
    recompute_as(config, model)
    ids = torch.randint(4, 24, (5, 16))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0  # some padding: else transformers leaves the mask out
    batch = {"input_ids": ids, "attention_mask": mask, **({"labels": ids} if labelled else {})}
    real = record_pass(Ledger(BLOCK_BYTES, 0), model, [], batch, config.half, "cpu").peak()
    fake = subject.timeline(config).peak()
    assert sum(fake) == pytest.approx(sum(real), rel=0.02, abs=ROUNDING)


@pytest.mark.parametrize(("kind", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_cuda_keeps_norms_and_softmax_in_float32_and_a_cpu_does_not(kind, dtype):
    states = torch.zeros(2, 8, dtype=torch.bfloat16)
    with autocast_rule(kind), torch.autocast("cpu", torch.bfloat16):
        assert functional.layer_norm(states, (8,)).dtype == dtype
        assert (states @ states.T).dtype == torch.bfloat16
        assert functional.softmax(states, -1).dtype == (torch.float32 if kind == "cuda" else states.softmax(-1).dtype)


def test_the_model_itself_is_left_as_it_was():
    model = make_model(device="cpu")
    before = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    make_subject(model).timeline(TrainConfig(5, True, half=True))
    after = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    assert before == after
    assert not model.is_activation_checkpointing
    assert all(parameter.grad is None for parameter in model.parameters())


def deep_net(kind=nn.Sequential):
    torch.manual_seed(0)
    layers = [Layer(32, 64) for _ in range(8)]
    return Net(nn.Sequential(*layers) if kind is nn.Sequential else kind(*layers), width=32).train()


def numbers(rows):
    return {"x": torch.zeros(rows, 5, device="meta"), "labels": torch.zeros(rows, dtype=torch.long, device="meta")}


def tokens(rows):
    ids = torch.zeros(rows, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def peak(subject):
    return subject.timeline(TrainConfig(64)).peak()


@pytest.mark.parametrize(
    ("make", "batch"), [(deep_net, numbers), (lambda: gpt2(n_layer=8).train(), tokens)], ids=["Sequential", "GPT-2"]
)
def test_a_few_layers_give_the_peak_of_the_whole_model(make, batch):
    cut, whole = MemoryModel(make(), batch, scales=False), keep_whole(MemoryModel(make(), batch))
    assert peak(cut) == peak(whole)
    assert any(repeat.copies > 1 for repeat in cut.timeline(TrainConfig(64)).repeats)
