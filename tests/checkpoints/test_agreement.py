"""Every difference between a checkpoint's run and this one is listed; what makes it another run is refused."""

import copy
import dataclasses
import json
from importlib.metadata import version

import pytest
from datasets import Dataset
from miniature_esm import make_esm
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, EsmForMaskedLM, default_data_collator

from hf_ext import FastTrainer, FastTrainingArguments, make_plan
from hf_ext.checkpoints.agreement.argument_roles import ANOTHER_RUN, HARMLESS, OTHER_STATES, STEP_SIZE, UNRECORDED
from hf_ext.checkpoints.agreement.comparing import GROUPS, compare_runs
from hf_ext.checkpoints.agreement.run_facts import describe_run
from hf_ext.errors import ArgumentError

TABLE = {"label": [0.0, 1.0]}


def build_model(**settings) -> EsmForMaskedLM:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return make_esm(**sizes | settings)


def describe(folder, model=None, rows=TABLE, collator=default_data_collator, world_size=1, **settings) -> dict:
    args = FastTrainingArguments(output_dir=str(folder), report_to=[], **settings)
    data = Dataset.from_dict(rows)
    model = build_model() if model is None else model
    facts = describe_run(args, model, data, collator, world_size, make_plan(args, model, data, collator))
    return json.loads(json.dumps(facts))


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    return describe(tmp_path_factory.mktemp("run"))


def alter(facts: dict, **arguments) -> dict:
    """The facts with other arguments; `world_size` and `devices_per_process` too."""
    new = copy.deepcopy(facts)
    for name, value in arguments.items():
        place = new if name in ("world_size", "devices_per_process") else new["arguments"]
        place[name] = value
    return new


def test_every_argument_has_exactly_one_role():
    names = {spec.name for spec in dataclasses.fields(FastTrainingArguments)}
    assert names - (ANOTHER_RUN | HARMLESS | UNRECORDED) == set()
    assert not (ANOTHER_RUN & HARMLESS) | (ANOTHER_RUN & UNRECORDED) | (HARMLESS & UNRECORDED)


@dataclasses.dataclass
class OwnArguments(FastTrainingArguments):
    tracker_token: str = ""
    own_setting: int = 1


def test_facts_are_json_and_hold_no_secret_and_no_path_of_the_call(tmp_path):
    tokens = {"hub_token": "hf_canary", "tracker_token": "hf_canary"}
    args = OwnArguments(output_dir=str(tmp_path / "here"), report_to=[], **tokens)
    facts = describe_run(args, build_model(), None, None, 1, None)
    assert facts["arguments"]["own_setting"] == 1
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert "hf_canary" not in text
    assert "here" not in text
    assert facts["versions"]["torch"] == version("torch")


def test_the_same_run_has_nothing_to_say(facts, tmp_path):
    changes = compare_runs(facts, describe(tmp_path))
    assert (changes.notes, changes.contradictions, changes.allowed) == ([], [], frozenset())


@pytest.mark.parametrize("name", sorted(OTHER_STATES))
def test_states_of_another_optimizer_or_schedule_are_refused_whatever_is_allowed(name):
    runs = {"arguments": {name: 1}}, {"arguments": {name: 2}}
    assert "its states do not fit" in compare_runs(*runs, ["all"]).contradictions[0]


@pytest.mark.parametrize("name", sorted(ANOTHER_RUN - OTHER_STATES - STEP_SIZE - {"accelerator_config"}))
def test_an_argument_that_makes_another_run_is_refused_unless_allowed(facts, name):
    # Else some of them have no effect.
    context = {"use_peft": True, "metric_for_best_model": "loss", "optim_ext": ["muon"]}
    old, new = (alter(facts, **{**context, name: value}) for value in (1, 2))
    line = f"{name}: 1 in the checkpoint, 2 now"
    refused = compare_runs(old, new)
    assert (refused.notes, refused.contradictions) == ([], [line])
    for allowed in (name, "all"):
        changes = compare_runs(old, new, [allowed])
        assert (changes.notes, changes.contradictions) == ([f"{line} (allowed)"], [])
        assert changes.allowed == {name}
    assert compare_runs(old, new, ["data"]).contradictions == [line]


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_argument_is_noted(facts, name):
    changes = compare_runs(alter(facts, **{name: "old"}), alter(facts, **{name: "new"}))
    assert (changes.notes, changes.contradictions) == ([f"{name}: old in the checkpoint, new now"], [])


@pytest.mark.parametrize(
    ("shared", "old", "new"),
    [
        ({"max_steps": 9}, {"num_train_epochs": 3.0}, {"num_train_epochs": 5.0}),
        ({"use_peft": False}, {"lora_r": 8}, {"lora_r": 16}),
        ({"optim_ext": None}, {"block_pattern": None}, {"block_pattern": "layers"}),
        ({}, {"metric_for_best_model": None}, {"metric_for_best_model": "loss"}),
    ],
)
def test_an_argument_without_effect_is_noted(facts, shared, old, new):
    changes = compare_runs(alter(facts, **shared, **old), alter(facts, **shared, **new))
    assert (len(changes.notes), changes.contradictions) == (1, [])


@pytest.mark.parametrize(
    ("old", "new", "noted", "refused"),
    [
        (["muon"], ["muon", "cpu_offload"], 1, 0),
        ("cpu_offload", None, 1, 0),
        (["cpu_offload", "muon"], ["muon", "cpu_offload"], 1, 0),
        (None, ["muon", "cpu_offload"], 0, 1),
    ],
)
def test_where_an_optimizer_steps_may_change_and_what_it_computes_may_not(facts, old, new, noted, refused):
    changes = compare_runs(alter(facts, optim_ext=old), alter(facts, optim_ext=new))
    assert (len(changes.notes), len(changes.contradictions)) == (noted, refused)


def test_nested_arguments_are_compared_entry_by_entry(facts):
    one, two = ({**facts["arguments"]["accelerator_config"], "even_batches": value} for value in (True, False))
    changes = compare_runs(alter(facts, accelerator_config=one), alter(facts, accelerator_config=two))
    assert changes.contradictions == ["accelerator_config.even_batches: True in the checkpoint, False now"]
    kwargs = [alter(facts, lr_scheduler_kwargs=value) for value in (None, {"a": 1}, {"a": 1, "b": 2})]
    assert compare_runs(kwargs[0], kwargs[1]).contradictions == [
        "lr_scheduler_kwargs: None in the checkpoint, {'a': 1} now"
    ]
    assert compare_runs(kwargs[1], kwargs[2]).contradictions == [
        "lr_scheduler_kwargs.b: not recorded in the checkpoint, 2 now"
    ]


def test_loading_settings_of_accelerate_are_not_compared(facts, tmp_path):
    new = describe(tmp_path, accelerator_config={"non_blocking": True})
    assert compare_runs(facts, new).contradictions == []


SHAPES = [  # batch, accumulation, processes, devices of each; the same rows in every step as 8, 2, 1, 1?
    ((4, 4, 1, 1), True),
    ((8, 1, 2, 1), True),
    ((4, 2, 2, 1), True),
    ((4, 2, 1, 2), True),
    ((8, 2, 2, 1), False),
    ((4, 2, 1, 1), False),
    ((8, 1, 1, 1), False),
]


def shape(facts: dict, numbers: tuple, **arguments) -> dict:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "devices_per_process")
    return alter(facts, **dict(zip(names, numbers)), **arguments)


@pytest.mark.parametrize(("numbers", "is_same"), SHAPES)
def test_batches_and_processes_may_change_while_every_step_takes_the_same_rows(facts, numbers, is_same):
    changes = compare_runs(shape(facts, (8, 2, 1, 1)), shape(facts, numbers))
    listed, empty = (changes.notes, changes.contradictions) if is_same else (changes.contradictions, changes.notes)
    assert len(listed) == sum(one != other for one, other in zip(numbers, (8, 2, 1, 1)))
    assert empty == []
    assert all(("(the same rows" in line) == is_same for line in listed)


@pytest.mark.parametrize(("numbers", "is_same"), [((4, 4, 1, 1), True), ((8, 1, 2, 1), True), ((8, 2, 2, 1), False)])
def test_batches_grouped_by_length_depend_on_the_rows_of_a_step(facts, numbers, is_same):
    grouped = {"train_sampling_strategy": "group_by_length"}
    changes = compare_runs(shape(facts, (8, 2, 1, 1), **grouped), shape(facts, numbers, **grouped))
    assert (changes.contradictions == []) == is_same


@pytest.mark.parametrize(
    ("numbers", "is_same"), [((4, 2, 1, 1), True), ((8, 1, 2, 1), True), ((8, 2, 2, 1), False), ((8, 1, 1, 1), False)]
)
def test_batches_by_tokens_depend_on_batches_per_step_and_not_on_the_batch_size(facts, numbers, is_same):
    budget = {"token_budget": {"kind": "L", "max_tokens": 100, "max_batch_size": None}}
    old, new = ({**shape(facts, each), "speedups": budget} for each in ((8, 2, 1, 1), numbers))
    assert (compare_runs(old, new).contradictions == []) == is_same


def test_split_batches_do_not_grow_with_the_number_of_processes(facts):
    config = {"accelerator_config": {**facts["arguments"]["accelerator_config"], "split_batches": True}}
    old = shape(facts, (8, 2, 1, 1), **config)
    assert compare_runs(old, shape(facts, (8, 2, 2, 1), **config)).contradictions == []
    assert len(compare_runs(old, shape(facts, (8, 1, 2, 1), **config)).contradictions) == 2


def test_another_number_of_processes_can_be_allowed(facts):
    old, new = shape(facts, (8, 2, 1, 1)), shape(facts, (8, 2, 4, 1))
    (told,) = compare_runs(old, new).contradictions
    assert told.startswith("world_size: 1 in the checkpoint, 4 now; --effective_batch_size 16 takes the same rows")
    assert compare_runs(old, new, ["world_size"]).allowed == {"world_size"}
    budget = {"token_budget": {"kind": "L", "max_tokens": 100, "max_batch_size": None}}
    (told,) = compare_runs({**old, "speedups": budget}, {**new, "speedups": budget}).contradictions
    assert "--gradient_accumulation_steps times processes is 2" in told


def test_other_data_are_refused_unless_allowed(facts, tmp_path):
    new = describe(tmp_path, rows={"label": [0.0, 2.0]})
    assert compare_runs(facts, new).contradictions == ["data: column 'label' holds other values"]
    assert compare_runs(facts, new, ["data"]).contradictions == []
    stream = {**facts, "data": {"kind": "stream", "num_rows": None, "columns": None, "source": {}}}
    assert compare_runs(stream, stream).notes == ["data: whether the values are the same cannot be told"]


def test_another_model_is_refused_unless_allowed(facts, tmp_path):
    changes = compare_runs(facts, describe(tmp_path, build_model(hidden_size=16)))
    assert changes.contradictions[0] == "model.config.hidden_size: 8 in the checkpoint, 16 now"
    assert {line.split(":")[0] for line in changes.contradictions[1:]} == {
        "model.num_trainable",
        "model.trainable_names",
    }
    assert compare_runs(facts, describe(tmp_path, build_model(hidden_size=16)), ["model"]).contradictions == []


def test_where_a_model_came_from_is_noted(facts):
    moved = copy.deepcopy(facts)
    moved["model"]["base"]["name_or_path"] = "/elsewhere"
    changes = compare_runs(facts, moved)
    assert changes.notes == ["model.base.name_or_path: '' in the checkpoint, /elsewhere now"]
    assert changes.contradictions == []


def test_what_trains_is_part_of_the_model(facts, tmp_path):
    model = build_model()
    model.lm_head.dense.weight.requires_grad_(False)
    changes = compare_runs(facts, describe(tmp_path, model))
    assert changes.contradictions[0].startswith("model.num_trainable: ")


def test_adapters_are_part_of_the_model(tmp_path):
    both = [get_peft_model(build_model(), LoraConfig(r=2, lora_alpha=a, target_modules=["query"])) for a in (4, 8)]
    old, new = (describe(tmp_path, model) for model in both)
    assert compare_runs(old, old).contradictions == []
    assert compare_runs(old, new).contradictions == ["model.adapters.default.lora_alpha: 4 in the checkpoint, 8 now"]


def test_what_only_another_version_knows_is_noted(facts):
    new = copy.deepcopy(facts)
    new["model"]["config"]["new_in_6_0"] = True
    new["arguments"]["new_in_6_0"] = 1
    new["versions"]["torch"] = "9.9"
    changes = compare_runs(facts, new)
    assert changes.contradictions == []
    assert sorted(changes.notes) == [
        "model.config.new_in_6_0: not recorded in the checkpoint, True now",
        "new_in_6_0: not recorded in the checkpoint, 1 now",
        f"version.torch: {version('torch')} in the checkpoint, 9.9 now",
    ]


def test_a_checkpoint_without_facts_is_continued_with_notes(facts):
    changes = compare_runs({}, facts)
    assert changes.contradictions == []
    assert "arguments: not recorded in the checkpoint" in changes.notes
    older = alter(facts)
    del older["arguments"]["learning_rate"]
    assert compare_runs(older, facts).notes == ["learning_rate: not recorded in the checkpoint, 5e-05 now"]


@pytest.mark.parametrize("allowed", ["mlm_probability", "collator"])
def test_settings_of_the_collator_are_compared(tmp_path, allowed):
    class Collator:
        def __init__(self, mlm_probability):
            self.mlm_probability, self.columns, self._calls = mlm_probability, {"heavy": ["heavy"]}, object()

        def __call__(self, rows):
            return rows

    old, new = (describe(tmp_path, collator=Collator(share)) for share in (0.15, 0.3))
    assert compare_runs(old, new).contradictions == ["collator.mlm_probability: 0.15 in the checkpoint, 0.3 now"]
    assert compare_runs(old, new, [allowed]).contradictions == []


def test_stock_collators_are_described(tmp_path, demo_encoders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_encoders[1])
    facts = describe(tmp_path, collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2))
    assert facts["collator"]["class"] == "DataCollatorForLanguageModeling"
    assert facts["collator"]["mlm_probability"] == 0.2


@pytest.mark.parametrize(
    ("name", "old", "new", "is_refused"),
    [
        ("attention", {"kind": "N", "kernel": "sdpa"}, {"kind": "N", "kernel": "varlen"}, False),
        ("compile", {"kind": "N"}, None, False),
        ("packing", {"kind": "I", "round_up": True}, None, False),
        ("batch_size", {"kind": "L", "gradient_accumulation_steps": 2}, None, False),
        ("encoder_precision", None, {"kind": "N", "dtype": "bfloat16", "mode": "autocast"}, True),
        ("token_budget", {"kind": "L", "max_tokens": 10}, {"kind": "L", "max_tokens": 20}, True),
        ("something_new", {"kind": "L"}, None, True),
    ],
)
def test_speed_ups_matter_where_they_change_the_data_or_what_is_learned(facts, name, old, new, is_refused):
    before, now = ({**facts, "speedups": {name: each} if each else {}} for each in (old, new))
    changes = compare_runs(before, now)
    assert (len(changes.contradictions), len(changes.notes)) == ((1, 0) if is_refused else (0, 1))
    assert compare_runs(before, now, ["speedups"]).contradictions == []


def test_packing_changes_the_batches_of_a_token_budget(facts):
    budget = {"token_budget": {"kind": "L", "max_tokens": 10}}
    packed = {**budget, "packing": {"kind": "I", "round_up": True}}
    lines = compare_runs({**facts, "speedups": budget}, {**facts, "speedups": packed}).contradictions
    assert lines == ["speed-up packing: off in the checkpoint, {'round_up': True} now"]


def test_unknown_names_cannot_be_allowed(facts):
    with pytest.raises(ArgumentError, match=r"unknown \['learning_rat'\].*all, .*learning_rate"):
        compare_runs(facts, facts, ["seed", "learning_rat"])
    assert compare_runs(facts, facts, [*GROUPS, "seed", "logging_steps", "class"]).contradictions == []


def test_two_trainers_made_alike_agree_before_and_after_training(make_affinity, demo_rows, tmp_path):
    facts = []
    for _ in range(2):
        model, collator = make_affinity()
        args = FastTrainingArguments(
            output_dir=str(tmp_path), max_steps=1, report_to=[], speedups=["embedding_cache"], save_strategy="no"
        )
        trainer = FastTrainer(model, args, collator, demo_rows.select(range(16)))
        before = describe_run(trainer.args, trainer.model, trainer.train_dataset, collator, 1, trainer.plan)
        trainer.train()
        after = describe_run(trainer.args, trainer.model, trainer.train_dataset, collator, 1, trainer.plan)
        facts += [before, after]
    assert all(compare_runs(facts[0], other).contradictions == [] for other in facts[1:])
    assert all(compare_runs(facts[0], other).notes == [] for other in facts[1:])
    assert facts[0]["model"]["encoders"][0].startswith("sha256:")
    moved = copy.deepcopy(facts[0])
    moved["model"]["encoders"][0] = "sha256:0"
    assert len(compare_runs(moved, facts[0]).contradictions) == 1
