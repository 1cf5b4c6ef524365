"""Muon for matrices of layers beside AdamW, and optimizers whose states left the device: bit for bit as torch does."""

import pytest
import torch
from accelerate import Accelerator
from any_models import bert, gpt2, mixtral, resnet, t5
from closeness import largest
from miniature_esm import esm_config
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    get_linear_schedule_with_warmup,
)
from transformers.optimization import Adafactor

from hf_ext.errors import ArgumentError
from hf_ext.models import LoraSettings, MuonAdamW, block_matrices, wrap_with_lora
from hf_ext.models.optimizers import HostOptimizer

pytestmark = pytest.mark.internals
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ESM = esm_config(vocab_size=24, mask_token_id=23)


def names_of(model: nn.Module) -> set[str]:
    chosen = {id(matrix) for matrix in block_matrices(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_matrices_of_an_esm_layer_are_these_six_and_nothing_of_embeddings_heads_or_norms():
    attention = [f"attention.{name}.weight" for name in ("self.query", "self.key", "self.value", "output.dense")]
    layer = {f"esm.encoder.layer.0.{name}" for name in (*attention, "intermediate.dense.weight", "output.dense.weight")}
    assert names_of(EsmForMaskedLM(ESM)) == names_of(EsmForSequenceClassification(ESM)) == layer


def test_a_pooler_is_no_layer_and_frozen_matrices_and_adapters_do_not_count():
    model = BertModel(BertConfig(**SHAPE, vocab_size=24))
    assert len(names_of(model)) == 6
    assert not any("pooler" in name for name in names_of(model))
    model.encoder.layer[0].attention.requires_grad_(False)
    assert names_of(model) == {"encoder.layer.0.intermediate.dense.weight", "encoder.layer.0.output.dense.weight"}
    assert names_of(wrap_with_lora(EsmForSequenceClassification(ESM), LoraSettings(r=2))) == set()


def make_small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_small_adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def make_both(net: nn.Sequential) -> MuonAdamW:
    return MuonAdamW(make_small_adamw(net.parameters()), [net[0].weight])


def take_steps(net: nn.Module, optimizers: list, first: int = 0, last: int = 5) -> None:
    for step in range(first, last):
        net.zero_grad()
        net(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def distance(net: nn.Module, other: nn.Module) -> float:
    return largest((a - b).abs().max() for a, b in zip(net.parameters(), other.parameters()))


def test_steps_are_those_of_the_two_optimizers_of_torch_side_by_side():
    together, apart, adamw = make_small_net(), make_small_net(), make_small_net()
    take_steps(together, [make_both(together)])
    muon = torch.optim.Muon([apart[0].weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    take_steps(apart, [muon, make_small_adamw([apart[0].bias, *apart[2].parameters()])])
    assert distance(together, apart) == 0.0
    take_steps(adamw, [make_small_adamw(adamw.parameters())])
    assert distance(together, adamw) > 1e-3


def test_state_loads_bit_for_bit(tmp_path):
    whole, resumed, lost = make_small_net(), make_small_net(), make_small_net()
    optimizer = make_both(whole)
    take_steps(whole, [optimizer], 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for net in (resumed, lost):
        net.load_state_dict(whole.state_dict())
    take_steps(whole, [optimizer], 3, 6)
    loaded = make_both(resumed)
    loaded.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(resumed, [loaded], 3, 6)
    assert distance(whole, resumed) == 0.0
    take_steps(lost, [make_both(lost)], 3, 6)
    assert distance(whole, lost) > 1e-4


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)


def test_matrices_of_layers_get_muon_in_any_model():
    for make, num in (
        (bert, 18),  # per layer: query, key, value, output, two of the feed-forward
        (gpt2, 12),  # Conv1D: query, key and value in one; the head is tied to the embeddings
        (mixtral, 12),  # 4 attention matrices in each; the router's weight has no in_features; experts are stacks
        (t5, 42),  # 6 in a layer of the encoder, 10 of the decoder; the tables of positions are embeddings
        (encoder, 8),  # in_proj is one matrix of 24 x 8
        (resnet, 0),  # convolutions only
    ):
        assert len(block_matrices(make())) == num


def test_what_is_tied_to_an_embedding_stays_with_adamw():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 8)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
            self.layers[0][0].weight = self.table.weight

    assert names_of(Tied()) == {"layers.0.1.weight", "layers.1.0.weight", "layers.1.1.weight"}


STEPS = 20


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def make_adamw(net, **given):
    """Two groups, of which the first has a rate of its own, as encoders have."""
    groups = [{"params": [*net[:3].parameters()], "lr": 1e-3}, {"params": [*net[3:].parameters()]}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **given})


MAKERS = {
    "adamw_fused": make_adamw,
    "adamw": lambda net: make_adamw(net, fused=False),
    "muon": lambda net: MuonAdamW(make_adamw(net), [net[0].weight, net[2].weight]),
    "adafactor": lambda net: Adafactor(net.parameters(), lr=1e-2, scale_parameter=False, relative_step=False),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1),  # has its state before the first step
}


class Training:
    """Steps of two clipped passes each, under a schedule; the last layer has a gradient in every second step."""

    def __init__(self, make, wrap=lambda optimizer: optimizer):
        self.net = make_net()
        self.optimizer = wrap(make(self.net))
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 3, 2 * STEPS)
        self.num_done, self.scale = 0, lambda loss: loss

    def run(self, num_steps: int = STEPS) -> "Training":
        for _ in range(num_steps):
            for part in range(2):
                rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * self.num_done + part))
                hidden = self.net[:4](rows)
                self.scale((self.net[4](hidden) if self.num_done % 2 else hidden).square().mean()).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.num_done += 1
        return self

    def difference(self, other: "Training") -> float:
        pairs = zip(self.net.parameters(), other.net.parameters(), strict=True)
        return largest((mine - theirs).abs().max() for mine, theirs in pairs)


class OldRates(HostOptimizer):
    """Broken: the host has groups of its own, to which no schedule writes."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._first = [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        for group, rate in zip(self.param_groups, self._first):
            group["lr"] = rate
        return super().step(closure)


@pytest.mark.parametrize("name", MAKERS)
def test_twenty_steps_on_the_host_equal_the_optimizers_own_bit_for_bit(name):
    plain, ours = Training(MAKERS[name]).run(), Training(MAKERS[name], HostOptimizer).run()
    assert plain.difference(ours) == 0.0
    assert plain.difference(Training(MAKERS[name])) > 1e-3  # it trained
    assert plain.difference(Training(MAKERS[name], OldRates).run()) > 1e-4  # and a broken twin is told apart
    assert equal_trees(plain.optimizer.state_dict(), ours.optimizer.state_dict())


def equal_trees(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return one == other


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["adamw_fused", "adamw", "muon"])
def test_a_loss_scaler_unscales_leaves_out_and_goes_on_as_without_the_host(name):
    def run(wrap):
        net, accelerator = make_net(), Accelerator(cpu=True)
        scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer, skipped = accelerator.prepare_optimizer(wrap(MAKERS[name](net))), []
        for step in range(6):
            loss = net(torch.full((2, 8), float(step))).square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if step % 2 == 0:  # else the scaler unscales by itself
                scaler.unscale_(optimizer.optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        return [[p.detach() for p in net.parameters()], scaler.state_dict(), optimizer.state_dict(), skipped]

    plain, ours = run(lambda optimizer: optimizer), run(HostOptimizer)
    assert equal_trees(plain[:3], ours[:3])
    assert ours[3] == [step == 3 for step in range(6)]  # of a fused kernel on the device accelerate sees nothing
    assert ours[1]["scale"] == 8.0  # 4, doubled after two steps, halved by the third, doubled again


def test_what_cannot_be_stepped_there_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"Linear is no torch\.optim\.Optimizer"):
        HostOptimizer(nn.Linear(1, 1))
    for library in ("bitsandbytes", "torchao"):
        foreign = type("AdamW8bit", (torch.optim.SGD,), {"__module__": f"{library}.optim.adamw"})
        with pytest.raises(ArgumentError, match=rf"AdamW8bit \({library}\) steps by kernels of its own"):
            HostOptimizer(foreign(make_net().parameters(), lr=0.1))
