"""A pass of three layers without memory says what a pass of the whole model holds, for any number of rows."""

import pytest
import torch
from ledger_subjects import keep_whole, make_model, make_subject
from torch.nn import functional

from hf_ext.memory.fakes import autocast_rule
from hf_ext.memory.forecast import TrainConfig
from hf_ext.memory.probe import BLOCK_BYTES, Ledger, Repeat, Timeline, record_pass
from hf_ext.models.activation_checkpointing import set_policy

ROUNDING = 64 * BLOCK_BYTES  # tensors that live at once, each rounded for its own number of rows

CONFIGS = [
    TrainConfig(5, "none"),
    TrainConfig(5, "attention"),
    TrainConfig(5, "full"),
    TrainConfig(5, "half", half=True),
    TrainConfig(5, "attention", half=True),
    TrainConfig(5, "none", half=True),
    TrainConfig(5, "full", half=True),
]


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (TrainConfig(5, "none", half=True), {"training": "lora"}),
        (TrainConfig(5, "full", half=True, base="half"), {"training": "lora"}),
        (TrainConfig(5, "attention", half=True, base="4-bit"), {"training": "lora"}),
        (TrainConfig(5, "none"), {"training": "frozen"}),
        (TrainConfig(5, "none"), {"attention": "eager"}),
        (TrainConfig(5, "full", half=True), {"family": "bert"}),
        (TrainConfig(5, "none"), {"family": "t5"}),
        (TrainConfig(5, "half"), {"family": "t5"}),
    ],
    ids=str,
)
def test_so_it_does_with_adapters_packing_and_other_families(config, settings):
    model = make_model(**settings)
    labelled = settings.get("family", "esm") == "esm"
    cut, whole = make_subject(model, labelled=labelled, scales=False), make_subject(model, labelled=labelled)
    assert peaks(cut, config) == peaks(keep_whole(whole), config)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"training": "lora"}, {"packed": True}], ids=str)
def test_one_pass_answers_for_any_number_of_rows(settings):
    model = make_model(**settings)
    subject = make_subject(model)
    for rows in (2, 5, 64):
        config = TrainConfig(rows, "none", half=True)
        exact, found = (s.timeline(config).peak() for s in (make_subject(model, scales=False), subject))
        assert abs(sum(found) - sum(exact)) < ROUNDING
    assert len(subject.timelines) == 1


REAL = {
    "full": ({}, TrainConfig(5, "none")),
    "full, bf16": ({}, TrainConfig(5, "none", half=True)),
    "recomputing all": ({}, TrainConfig(5, "full", half=True)),
    "recomputing attention": ({}, TrainConfig(5, "attention")),
    "every second": ({}, TrainConfig(5, "half")),
    "LoRA": ({"training": "lora"}, TrainConfig(5, "none", half=True)),
    "frozen": ({"training": "frozen"}, TrainConfig(5, "none")),
    "eager": ({"attention": "eager"}, TrainConfig(5, "none")),
    "T5": ({"family": "t5"}, TrainConfig(5, "none")),
    "BERT": ({"family": "bert"}, TrainConfig(5, "none", half=True)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", REAL)
def test_fake_tensors_hold_what_real_ones_hold(name):
    settings, config = REAL[name]
    labelled = settings.get("family", "esm") == "esm"
    subject = make_subject(make_model(**settings), kind="cpu", labelled=labelled)
    model = make_model(device="cpu", **settings)
    set_policy(model, config.policy)
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
    with autocast_rule(True, kind) as opened, opened():
        assert functional.layer_norm(states, (8,)).dtype == dtype
        assert (states @ states.T).dtype == torch.bfloat16
        assert functional.softmax(states, -1).dtype == (torch.float32 if kind == "cuda" else states.softmax(-1).dtype)


def test_the_model_itself_is_left_as_it_was():
    model = make_model(device="cpu")
    before = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    make_subject(model).timeline(TrainConfig(5, "full", half=True))
    after = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    assert before == after
    assert not model.is_activation_checkpointing
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_fullest_moment_may_lie_before_between_or_behind_the_layers():
    def peak(*levels, copies=4, standing=0):
        others, gradients = zip(*levels)
        as_arrays = [torch.tensor(values).numpy() for values in (others, gradients)]
        return Timeline(*as_arrays, (Repeat(1, 3, copies),)).peak(standing)

    growing = peak((1, 0), (2, 0), (3, 0), (1, 0))  # each copy adds 2: 1 + 4 x 2
    assert (growing.activations, growing.gradients) == (9, 0)
    shrinking = peak((9, 0), (8, 0), (7, 2), (0, 2), copies=3)
    assert (shrinking.activations, shrinking.gradients) == (9, 0) or sum(shrinking) == 9
    behind = peak((1, 0), (1, 1), (1, 1), (1, 1))  # gradients stay: 1 + 4
    assert sum(behind) == 5
    assert sum(peak((1, 0), (3, 0), (1, 1), (1, 1), standing=4)) == 7
