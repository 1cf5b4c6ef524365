"""A speed-up is one class and one entry of the registry: whoever asks about speed-ups hears of it, and of no other."""

from dataclasses import replace

import pytest
from doctored import gather_facts, main
from inside import MaskedLMArguments, find_switches
from tiny_masked_lm import make_args, make_trainer
from torch import nn

from hf_ext import speedups
from hf_ext.arguments import PredictingArguments
from hf_ext.checkpoints import compare_runs
from hf_ext.errors import ArgumentError
from hf_ext.memory import MemoryModel, TrainConfig
from hf_ext.property import training_arguments
from hf_ext.speedups import Speedup
from hf_ext.speedups.base import applied, off

pytestmark = pytest.mark.internals


class Toy(Speedup):
    """A toy: marks models, and says that the optimizer needs no memory of the device."""

    NAME = "toy"
    predicts = True
    compared = ("strength",)
    costs = {"on_host": True}
    group = "states"

    def decide(self, context):
        return applied("marks the model", {"strength": 3, "other": 1}) if self.wanted(context) else off()

    def apply(self, decision, run):
        self.change(run.model, decision.settings)
        run.on_end(lambda: delattr(run.model, "mark"))
        return decision.with_evidence(marked=1)

    def change(self, model, settings):
        model.mark = settings["strength"]

    def count(self, costs, settings):
        return replace(super().count(costs, settings), kept_bytes=settings["strength"])

    def saves_memory(self, memory, config):
        return not config.on_host


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr("hf_ext.speedups.registry.REGISTRY", (*speedups.REGISTRY, Toy()))


def test_a_speed_up_of_one_class_and_one_entry_is_decided_applied_and_undone(toy, tmp_path):
    trainer = make_trainer(tmp_path, speedups=["all"])
    assert trainer.plan.applied("toy")
    assert trainer.plan["toy"].evidence == {"marked": 1}
    assert trainer.model.mark == 3
    assert "toy" in trainer.plan.table()
    trainer.end()
    assert not hasattr(trainer.model, "mark")
    assert not make_trainer(tmp_path, speedups=["all"], without=["toy"]).plan.applied("toy")


def test_it_is_offered_to_predictions_and_done_to_other_models_than_the_runs(toy, tmp_path):
    assert "toy" in training_arguments(PredictingArguments(), output_dir="o").speedups
    assert training_arguments(PredictingArguments(speedups=[]), output_dir="o").speedups == []
    other = nn.Linear(1, 1)
    make_trainer(tmp_path, speedups=["toy"]).plan.speed_up(other)
    assert other.mark == 3


def test_a_continued_run_must_agree_on_what_it_names(toy, tmp_path):
    trainers = [make_trainer(tmp_path, speedups=names) for names in (["toy"], [])]
    on, out = (trainer._ext_parts.resumer.describe() for trainer in trainers)
    assert on["speedups"] == {"toy": {"strength": 3}}
    assert compare_runs(out, on).contradictions == ["speed-up toy: off in the checkpoint, {'strength': 3} now"]
    assert compare_runs(out, on, ["speedups"]).contradictions == []
    assert compare_runs(on, on).contradictions == []


def test_the_doctor_counts_what_it_costs(toy):
    model = MaskedLMArguments(model_size="demo")
    on, out = (main(gather_facts("t4", model=model, speedups=names)) for names in (["toy"], []))
    assert (on.memory.forecast.optimizer, out.memory.forecast.optimizer > 0) == (0, True)
    assert on.plan.count_costs(on.stage.args).kept_bytes == 3
    memory, offers = MemoryModel(nn.Linear(1, 1), dict), [one.offer for one in speedups.REGISTRY]
    for on_host, expected in ((False, ["--speedups all precision", "--speedups all toy"]), (True, [])):
        step = TrainConfig(1, optimizer="sgd", on_host=on_host, half=on_host)
        assert [switch.option for switch in find_switches(memory, step, offers)] == expected


def test_unknown_names_are_refused_with_those_that_there_are(tmp_path):
    plan = make_trainer(tmp_path).plan
    for ask in (plan.applied, plan.__getitem__, plan.record, speedups.find_speedup):
        with pytest.raises(LookupError, match=r"speed-up 'toy': there are cpu_matmul, .*compile"):
            ask("toy")
    for flag in ("speedups", "without"):
        with pytest.raises(ArgumentError, match=r"allowed are all, .*cpu_matmul"):
            make_args(**{flag: ["toy"]})
    with pytest.raises(ArgumentError, match="speedups='toy'"):
        training_arguments(PredictingArguments(speedups=["toy"]), output_dir="o")
    assert not plan.applied("compile")


def test_those_of_predictions_change_neither_rows_nor_what_is_learned():
    offered = [one for one in speedups.REGISTRY if one.predicts]
    names = {"cpu_matmul", "tf32", "cpu_memory", "fused_gelu", "fused_qkv", "attention", "embedding_cache"}
    assert {one.NAME for one in offered} == names | {"data_loading"}
    assert all(one.KIND != "L" and one.compared is None for one in offered)
