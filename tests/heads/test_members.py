"""Members that read residues, kernels and near rows: by hand, on labels without meaning, in a run."""

import json
import subprocess
import sys
from functools import partial
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inside import build_affinity_model
from transformers import TrainerControl, TrainerState

from hf_ext.data import RESIDUES, SequenceFeatures
from hf_ext.errors import ArgumentError
from hf_ext.heads import StopIdle, ensemble, may_stop, members, networks
from hf_ext.models import (
    COMPARED,
    COUNTS,
    DIRECTIONS,
    FEATURES,
    HeadEnsemble,
    KernelMap,
    NetworkStack,
    principal_directions,
)
from hf_ext.property import AffinityArguments

pytestmark = pytest.mark.internals
ROWS = [{"seq": text} for text in ("ACD", "AYD", "AYE")]


def test_counts_of_residues_survive_json_and_are_those_of_the_training_rows():
    counts = SequenceFeatures.fit(ROWS, ["seq"], 2048)
    again = SequenceFeatures.from_state(json.loads(json.dumps(counts.state())))
    # C and Y at the second position, D and E at the third; W was never seen, a fourth residue is not read.
    assert again.matrix([{"seq": "ACDW"}, {"seq": "AWE"}]).tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]
    assert again.matrix([]).shape == (0, 4)
    assert SequenceFeatures.fit(ROWS, ["seq"], 2).num_features == 2


def test_a_linear_ridge_on_the_map_of_all_rows_is_a_kernel_ridge_and_that_of_half_of_them_is_not():
    generator = np.random.default_rng(0)
    rows, labels = generator.normal(size=(40, 3)), generator.normal(size=40)
    distances = np.square(rows[:, None] - rows).sum(-1)
    kernel = np.exp(-distances / distances.mean())
    expected = kernel @ np.linalg.solve(kernel + 0.1 * np.eye(40), labels)

    def ridge(landmarks):
        given = torch.from_numpy(rows).float()
        mapped = KernelMap.fit(given[:landmarks])(given).double().numpy()
        return mapped @ np.linalg.solve(mapped.T @ mapped + 0.1 * np.eye(mapped.shape[1]), mapped.T @ labels)

    np.testing.assert_allclose(ridge(40), expected, atol=2e-3)
    assert np.abs(ridge(20) - expected).max() > 0.1


def test_near_rows_by_hand():
    made = HeadEnsemble([1], [1], [])
    stack = made.make_stack(DIRECTIONS, 1, [3, 2], "nearest")
    stack.fill(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([1.0, 4.0, 70.0]))
    # From 1 both are as far: the mean. From 0 squares are 0 and 4: weights 1 and exp(-3).
    share = np.exp(-3) / (1 + np.exp(-3))
    assert stack(torch.tensor([[1.0], [0.0]])).flatten().tolist() == pytest.approx([2.5, 1 + 3 * share])
    made.add(DIRECTIONS, 1.0, stack)
    made.get_buffer("basis_0").fill_(1.0)
    again = HeadEnsemble([1], **json.loads(json.dumps(made.shapes())))
    again.load_state_dict(made.state_dict())
    assert again(torch.tensor([[1.0]])).item() == pytest.approx(2.5)


def make_views(num_rows: int):
    """Random features and counts, and an ensemble that reads them in every way."""
    torch.manual_seed(0)
    features = torch.randn(num_rows, 6)
    counts = torch.randint(0, 2, (num_rows, 5)).float()
    basis = principal_directions(features)
    made = HeadEnsemble([6], [basis.shape[1]], [], num_residues=5, num_counts=3)
    made.fit_directions([basis], features)
    for view, values in ((FEATURES, features), (RESIDUES, counts), (COUNTS, counts[:, 2:])):
        made.add_kernel(view, KernelMap.fit(values[:50]))
    views = {view: made.read(view, features, counts) for view in (FEATURES, DIRECTIONS, RESIDUES, COUNTS, *COMPARED)}
    return made, views


def test_what_only_residues_know_is_found_by_them_and_nothing_in_shuffled_labels_by_any(monkeypatch):
    monkeypatch.setattr(members, "NETWORKS", ())
    made, views = make_views(240)
    folds = ensemble.make_folds(180, 60, 320, None, 0)
    rows = np.concatenate(folds)

    def weigh(labels, kind):
        objective = ensemble.OBJECTIVES["ridge"](labels, 1)
        args = SimpleNamespace(device=torch.device("cpu"))
        fitted = members.fit_members(made, views, objective, folds, [], 0.0, args)
        chosen = [fitted[0], *(one for one in fitted if kind in one.name)]
        assert len(chosen) > 1
        scored = np.stack([one.scored for one in chosen])
        weights = ensemble.choose_weights(
            scored, lambda given: objective.errors(given, rows), [one.kind for one in chosen], len(rows)
        )
        return chosen, weights

    known = views[RESIDUES].numpy().astype(np.float64)
    labels = known[:, 0] * known[:, 1]  # of two at once, which no linear model knows
    kinds = ("ridge on residues", "kernel of residues", "both kernels", "kernel of features", "nearest rows", "counts")
    errors = {kind: 1 - float(weigh(labels, kind)[1][0]) for kind in kinds}
    assert errors["kernel of residues"] == errors["both kernels"] == 1
    assert errors["kernel of features"] == errors["nearest rows"] == errors["counts"] == 0
    # Of one input, a linear model of directions says what that of features does.
    assert not any("on directions" in one.name for one in weigh(labels, "ridge")[0])
    chosen, weights = weigh(labels, "residues")
    assert sum(weight for one, weight in zip(chosen, weights) if "kernel" in one.name) > 0.8
    shuffled = np.random.default_rng(1).permutation(labels)
    assert [weigh(shuffled, kind)[1][0] for kind in kinds] == [1.0] * len(kinds)


def test_a_head_that_reads_residues_asks_for_them_and_what_no_member_reads_is_dropped():
    made, views = make_views(60)
    counts = views[RESIDUES]
    made.add("kernel of residues", 1.0, made.make_stack("kernel of residues", 1, []))
    made.drop_unread()
    assert [*made.kernels] == [RESIDUES]
    again = HeadEnsemble([6], **json.loads(json.dumps(made.shapes())))
    again.load_state_dict(made.state_dict())
    torch.testing.assert_close(again(views[FEATURES], counts), made(views[FEATURES], counts))
    assert made(views[FEATURES], counts).std() > 1e-3
    with pytest.raises(ArgumentError, match="No residues: some heads of this model read them"):
        made(views[FEATURES])
    plain, views = make_views(60)
    plain.add(FEATURES, 1.0, plain.make_stack(FEATURES, 1, []))
    plain.drop_unread()
    assert (plain.sizes[RESIDUES], len(plain.kernels)) == (0, 0)
    plain(views[FEATURES])


def test_an_unused_network_stops_after_three_epochs_unless_told_and_those_of_heads_after_eight_without_gain():
    def stops(is_unused, epoch, best_epoch=None):
        control = TrainerControl()
        steps = {"global_step": round(40 * (epoch or 0)), "best_global_step": best_epoch and 40 * best_epoch}
        StopIdle(is_unused).on_save(SimpleNamespace(), TrainerState(epoch=epoch, **steps), control)
        return control.should_training_stop

    assert [stops(True, None), stops(True, 2.9), stops(True, 3.0)] == [False, False, True]
    assert [stops(False, 11.0, 4), stops(False, 12.0, 4), stops(False, 29.0)] == [False, True, False]
    frozen, full = (AffinityArguments(encoders=["one"], tower_training=[how]) for how in ("frozen", "full"))
    assert may_stop(frozen, {"seed", "learning_rate"})
    assert not may_stop(full, {"seed"})
    assert not any(may_stop(frozen, {name}) for name in ("num_train_epochs", "max_steps", "early_stopping_patience"))

    class Counted(ensemble.OBJECTIVES["ridge"]):
        num_steps = 0

        def loss(self, outputs, rows):
            Counted.num_steps += 1
            return super().loss(outputs, rows)

    objective = Counted(np.random.default_rng(0).normal(size=40))  # labels without meaning: the first are the best
    folds = ensemble.make_folds(32, 8, 320, None, 0)
    stack = NetworkStack(len(folds), [(6, 8), (8, 1)])
    settings = {"train_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 400}
    args = SimpleNamespace(**settings, learning_rate=0.03, weight_decay=0.0, seed=0, device="cpu")
    torch.manual_seed(0)
    members.train_networks(stack, torch.randn(40, 6), objective, folds, args, 1.0, Event())
    assert 8 <= Counted.num_steps < 100  # of 400, one in each epoch

    inputs = torch.randn(40_000, 6)
    objective = Counted(inputs.sum(1).double().numpy())
    folds = ensemble.make_folds(39_992, 8, 320, None, 0)
    args = SimpleNamespace(**{**vars(args), "train_batch_size": 39_992, "learning_rate": 1e-3})
    Counted.num_steps = 0
    members.train_networks(stack, inputs, objective, folds, args, 1.0, Event())
    assert Counted.num_steps == 12  # many rows are read twelve times


def test_networks_trained_at_once_are_those_of_one_after_another(monkeypatch):
    inputs = torch.randn(60, 6)
    objective = ensemble.OBJECTIVES["ridge"](inputs[:, 0].double().numpy())
    folds = ensemble.make_folds(50, 10, None, None, 0)
    settings = {"train_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 5}
    args = SimpleNamespace(**settings, learning_rate=0.01, weight_decay=0.0, seed=0, device="cpu")

    def train(num_threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        torch.manual_seed(0)
        stacks = [NetworkStack(len(folds), [(6, 8), (8, 1)], 0.5) for _ in range(4)]
        tasks = [partial(members.train_networks, one, inputs, objective, folds, args, 1.0) for one in stacks]
        return np.stack(members.side_by_side(tasks, torch.device("cpu"))), torch.rand(1)

    before = torch.get_num_threads()
    (alone, after_alone), (at_once, after_at_once) = train(1), train(4)
    monkeypatch.undo()
    np.testing.assert_array_equal(alone, at_once)
    assert len({one.tobytes() for one in alone}) == 4  # each began with other weights
    assert after_alone == after_at_once  # torch's own random numbers are not drawn
    torch.set_num_threads(before)


def test_large_steps_alone_round_where_bf16_is_native(monkeypatch):
    objective = ensemble.OBJECTIVES["ridge"](np.random.default_rng(0).normal(size=64))
    folds = ensemble.make_folds(48, 16, None, None, 0)[:1]
    settings = {"train_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": 3, "num_train_epochs": 1}
    args = SimpleNamespace(**settings, learning_rate=0.01, weight_decay=0.0, seed=0, device="cpu")

    def train(width, is_native):
        monkeypatch.setattr(networks, "detect_hardware", lambda device: SimpleNamespace(native_bf16=is_native))
        torch.manual_seed(0)
        stack = NetworkStack(1, [(256, width), (width, 1)])
        return members.train_networks(stack, torch.randn(64, 256), objective, folds, args, 1.0, Event())

    np.testing.assert_array_equal(train(256, True), train(256, False))
    large, exact = train(512, True), train(512, False)
    np.testing.assert_allclose(large, exact, atol=0.05)
    assert not np.array_equal(large, exact)


TWICE = """
import os, signal, threading, time, torch
from hf_ext.heads import networks
def wait(stop):
    stop.wait(60)
    time.sleep(1)  # the rest of an epoch
torch.set_num_threads(2)
for after in (0.3, 0.6):
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    networks.side_by_side([wait, wait, wait], torch.device("cpu"))
except KeyboardInterrupt:
    print(torch.get_num_threads())
try:
    time.sleep(10)
except KeyboardInterrupt:
    raise SystemExit(75)
"""


@pytest.mark.nightly
def test_two_interrupts_end_networks_that_train_and_the_process_with_its_own_status():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "2\n"), done.stderr


def test_a_head_that_adopts_a_network_predicts_what_that_does(demo_encoders):
    torch.manual_seed(0)
    arguments = AffinityArguments(encoders=[demo_encoders[0]], head_sizes=[5, 4], head_dropout=0.0)
    model = build_affinity_model(arguments, ["seq"]).eval()
    model.fit_scaling(7.0, 2.0, {"seq": torch.randn(9, *model.embedding_sizes.values())})
    given = {"seq": torch.randn(3, *model.embedding_sizes.values())}
    stack = NetworkStack(2, [(given["seq"].shape[1], 5), (5, 4), (4, 1)])
    expected = stack(model.head.standardize(given["seq"]))[..., 0]
    ensemble.adopt_network(model, stack)
    torch.testing.assert_close(model(embeddings=given).logits, expected[0], rtol=1e-4, atol=1e-4)
    assert (expected[1] - expected[0]).abs().max() > 0.05
