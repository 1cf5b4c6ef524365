"""Models of every kind of label: shapes, losses worked out by hand, what is not known, what is cut, and saving."""

import math

import pytest
import torch
from inside import build_affinity_model
from labelled_rows import KINDS, MAX_RESIDUES, make_labelled, make_rows

from hf_ext.data import SequenceCollator
from hf_ext.errors import ArgumentError
from hf_ext.labels import ONE_NUMBER, make_kind
from hf_ext.models import AffinityModel, LoraSettings, TowerSpec, build_config, read_encoder
from hf_ext.property import AffinityArguments

RESIDUES = ["residue_classes", "residue_numbers"]
CHAINS = [{"chain": "ACD"}, {"chain": "MK"}]


def with_constant_output(name, encoder, outputs, **settings):
    """A model whose head puts out the same numbers for whatever it reads."""
    model, collator = make_labelled(name, encoder, "frozen")
    for key, value in settings.items():
        setattr(model.config, key, value)
    torch.nn.init.zeros_(model.head.layers[-1].weight)
    model.head.layers[-1].bias.data = torch.tensor(outputs)
    return model.eval(), collator


def run(model, collator, labels):
    return model(**collator([{**row, "label": label} for row, label in zip(CHAINS, labels)]))


LOG2 = math.log(2)


def test_numbers_are_in_label_units_and_only_known_ones_count(demo_encoders):
    scale = {"label_mean": [1.0, 10.0], "label_std": [2.0, 5.0]}
    output = run(*with_constant_output("numbers", demo_encoders[1], [0.5, 0.0], **scale), [[4.0, math.nan], [1, 20]])
    assert output.logits.tolist() == [[2.0, 10.0]] * 2
    # Standardised: 1.5, unknown; 0, 2. Distances: 1, -0.5, 2.
    assert output.loss.item() == pytest.approx((1 + 0.25 + 4) / 3)


def test_classes_have_cross_entropy_and_an_unknown_one_none(demo_encoders):
    model, collator = with_constant_output("classes", demo_encoders[1], [0.0, LOG2, 0.0])  # 1/4, 1/2, 1/4
    assert run(model, collator, [1, 0]).loss.item() == pytest.approx((LOG2 + 2 * LOG2) / 2)
    assert run(model, collator, [1, -100]).loss.item() == pytest.approx(LOG2)
    assert run(model, collator, [-100, -100]).loss.item() == 0.0
    assert run(model, collator, [1, 0]).logits.softmax(-1)[0].tolist() == pytest.approx([0.25, 0.5, 0.25])
    model.config.temperature = 0.5  # logits twice as far apart, the loss of training as it was
    assert run(model, collator, [1, 0]).logits[0].tolist() == pytest.approx([0, 2 * LOG2, 0])
    assert run(model, collator, [1, -100]).loss.item() == pytest.approx(LOG2)


def test_each_label_of_a_set_has_binary_cross_entropy(demo_encoders):
    model, collator = with_constant_output("sets", demo_encoders[1], [math.log(3), 0.0, 0.0])  # 3/4, 1/2, 1/2
    output = run(model, collator, [[1.0, 0.0, math.nan], [0.0, math.nan, math.nan]])
    assert output.loss.item() == pytest.approx((-math.log(0.75) + LOG2 - math.log(0.25)) / 3)


def test_residues_have_a_loss_each_and_what_is_behind_a_row_is_minus_100(demo_encoders):
    model, collator = with_constant_output("residue_classes", demo_encoders[1], [0.0, LOG2, 0.0])
    output = run(model, collator, [[1, 0, -100], [1, -100]])
    assert output.logits.shape == (2, 3, 3)
    assert output.logits[1, 2].tolist() == [-100] * 3
    assert (output.logits[0] > -100).all()
    assert output.loss.item() == pytest.approx((LOG2 + 2 * LOG2 + LOG2) / 3)
    scale = {"label_mean": 1.0, "label_std": 2.0}
    model, collator = with_constant_output("residue_numbers", demo_encoders[1], [0.5], **scale)
    output = run(model, collator, [[2.0, 4.0, math.nan], [math.nan, 0.0]])
    assert output.logits.tolist() == [[2.0, 2.0, 2.0], [2.0, 2.0, -100.0]]
    assert output.loss.item() == pytest.approx((0 + 1 + 1) / 3)  # standardised: 0.5, 1.5 and -0.5


@pytest.mark.parametrize("name", KINDS)
def test_rows_one_by_one_give_the_logits_and_add_up_to_the_loss_of_the_batch(demo_encoders, name):
    model, collator = make_labelled(name, demo_encoders[1])
    model.eval().head.layers[-1].bias.data = torch.linspace(-1, 2, model.head.num_outputs or 1)
    rows = list(make_rows(name))
    batch = collator(rows)
    with torch.no_grad():
        whole = model(**batch)
        alone = [model(**collator([row])) for row in rows]
    for found, one in zip(whole.logits, alone):
        torch.testing.assert_close(found[: one.logits.shape[1]] if name in RESIDUES else found, one.logits[0])
    known = [collator([row])["labels"].ne(-100).sum().item() for row in rows]
    total = sum(one.loss.item() * number for one, number in zip(alone, known))
    assert whole.loss.item() == pytest.approx(total / sum(known), rel=1e-5)
    by_row = model.row_losses(whole.logits, batch["labels"])
    assert by_row.tolist() == pytest.approx([one.loss.item() * n for one, n in zip(alone, known)], rel=1e-4)
    mean_of_means = sum(one.loss.item() for one in alone) / len(rows)  # the broken twin
    assert abs(whole.loss.item() - mean_of_means) > 1e-4 * whole.loss.item()
    batch["sequences"]["chain"]["attention_mask"].fill_(1)
    assert not torch.allclose(model(**batch).logits, whole.logits)  # attention to padding is told apart


@pytest.mark.parametrize("name", RESIDUES)
def test_labels_are_cut_as_sequences_are(demo_encoders, name):
    _, collator = make_labelled(name, demo_encoders[1])
    rows = list(make_rows(name))
    batch = collator(rows)
    lengths = batch["sequences"]["chain"]["residue_mask"].sum(1)
    assert batch["labels"].shape == (16, lengths.max())
    assert lengths.max() == MAX_RESIDUES < max(len(row["chain"]) for row in rows)
    longest = int(lengths.argmax())
    expected = [-100 if value != value else value for value in rows[longest]["label"][:MAX_RESIDUES]]
    assert batch["labels"][longest].tolist() == pytest.approx(expected)


def test_tensors_of_labels_have_the_dtype_of_their_kind():
    kinds = {**KINDS, "number": ONE_NUMBER}
    values = {name: make_rows(name, 3)["label"] for name in KINDS} | {"number": [1.0, -100.0, 2.5]}
    found = {name: kind.stack(values[name]) for name, kind in kinds.items()}
    integers = {name for name, labels in found.items() if labels.dtype == torch.int64}
    assert integers == {"classes", "residue_classes"}
    assert {labels.dtype for name, labels in found.items() if name not in integers} == {torch.float32}
    assert found["number"].tolist() == [1.0, -100.0, 2.5]
    assert found["numbers"].tolist() == [[-1.0, -100.0], [-0.75, 105.0], [-0.5, 110.0]]


def test_a_measured_minus_100_is_known():
    rows = {"numbers": [[-100.0, math.nan]], "residue_numbers": [[-100.0, 1.0, math.nan], [2.0]]}
    found = {name: KINDS[name].stack(values) for name, values in rows.items()}
    assert found["numbers"].ne(-100).tolist() == [[True, False]]
    assert found["residue_numbers"].ne(-100).tolist() == [[True, True, False], [True, False, False]]
    assert found["numbers"][0, 0].item() == pytest.approx(-100)


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_model_and_its_collator_know_their_kind(demo_encoders, tmp_path, name):
    model, collator = make_labelled(name, demo_encoders[1])
    if name == "numbers":
        model.config.label_mean, model.config.label_std = [1.0, 2.0], [3.0, 4.0]
    model.config.temperature = 1.5
    model.save_pretrained(tmp_path)
    collator.save_pretrained(tmp_path)
    again, batches = AffinityModel.from_pretrained(tmp_path), SequenceCollator.from_pretrained(tmp_path)
    assert again.config.kind == batches.kind == KINDS[name]
    assert again.config.temperature == 1.5
    batch = batches(list(make_rows(name)))
    assert torch.equal(again.eval()(**batch).logits, model.eval()(**batch).logits)


@pytest.mark.parametrize("form", ["product", "gated"])
def test_heads_of_every_form_have_as_many_outputs_as_there_are_classes(demo_encoders, form):
    model, collator = make_labelled("residue_classes", demo_encoders[1], head=form)
    assert model(**collator(list(make_rows("residue_classes")))).logits.shape == (16, MAX_RESIDUES, 3)


def test_embeddings_of_residues_need_to_say_where_rows_end(demo_encoders):
    model, _ = make_labelled("residue_classes", demo_encoders[1], "frozen")
    states, ends = torch.randn(5, 64), torch.tensor([[False, False, False], [False, False, True]])
    logits = model.eval()(embeddings={"chain": states}, missing={"chain": ends}).logits
    torch.testing.assert_close(logits[1, :2], model.head(states)[3:])  # the second row has the last two
    with pytest.raises(ArgumentError, match=r"No sequences or embeddings with `missing` for \['chain'\]"):
        model(embeddings={"chain": states})


def test_a_loss_that_the_labels_do_not_have_is_refused(demo_encoders):
    for name, loss in (("classes", "huber"), ("numbers", "tobit"), ("residue_numbers", "ranking")):
        with pytest.raises(ArgumentError, match=f"loss='{loss}': allowed for .* are mse"):
            make_labelled(name, demo_encoders[1], loss=loss)
    for name in ("numbers", "residue_numbers"):
        model, _ = make_labelled(name, demo_encoders[1], loss="huber")
        assert model.config.loss == "huber"


def test_residues_of_two_columns_cannot_have_labels(demo_encoders):
    spec, kind = read_encoder(demo_encoders[1], None, "frozen", LoraSettings()), KINDS["residue_classes"]
    for inputs in ([["heavy"], ["light"]], [["heavy", "light"]]):
        with pytest.raises(ArgumentError, match="the residues of one sequence column have labels"):
            build_config([spec], [TowerSpec(0, inputs)], label_kind=kind.state())


def test_one_number_under_another_name_is_what_it_was_without_a_kind(demo_encoders):
    kind, args = make_kind("regression", ("pKd",), ("pKd",)), AffinityArguments(encoders=[demo_encoders[1]])
    model = build_affinity_model(args, ["chain"], kind=kind)
    assert model.config.label_kind is None
    assert not model.skips_unknown
