"""A run of the recipe before it trains: rows of a stage, what a stage sets, inputs, models, the configuration file."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from inside import (
    AntibodyRows,
    GeneratorArguments,
    Inputs,
    build_generator,
    load_generator,
    load_pairs,
    resolve_columns,
    resolve_stage,
    sample_pairs,
)
from tiny_generators import AFFINITIES, ANTIGENS, HEAVIES, LIGHTS
from transformers import EsmConfig

from hf_ext.arguments import parse_command
from hf_ext.data import DataArguments, TokenBudgetBatchSampler, count_tokens, make_demo_pairs
from hf_ext.errors import ArgumentError, DataError
from hf_ext.generation.building import build_inputs
from hf_ext.generation.preparing import PairData
from hf_ext.generation.stages import check_auto
from hf_ext.hardware import describe_hardware
from hf_ext.models import AntibodyGenerator, GeneratorConfig
from hf_ext.models.generation.esm import PretrainedEncoder
from hf_ext.plan import make_plan
from hf_ext.tasks import find_task
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals


def make_table(num_antigens: int = 20, per_antigen: int = 5) -> Dataset:
    """pKd are 5, 6, 7, 8 and 9 for each antigen."""
    table = make_demo_pairs(num_antigens)
    rows = [{**table[i], "pKd": 5.0 + j} for i in range(num_antigens) for j in range(per_antigen)]
    return Dataset.from_list(rows)


def load(tmp_path, *, table=None, explicit=(), data=None, name=None, **given):
    args, data_args = GeneratorArguments(**given), DataArguments(dataset_name=name, **(data or {}))
    resolve_columns(args, data_args, {*explicit})
    table = make_table() if table is None and name is None else table
    return load_pairs(args, data_args, {*explicit}, output_dir=tmp_path, seed=0, table=table)


def test_antigens_are_split_and_a_split_of_rows_that_the_user_asked_for_is_warned_of(tmp_path):
    data = load(tmp_path)
    antigens = {name: {*rows["antigen"]} for name, rows in data.splits.items()}
    assert not antigens["train"] & (antigens["test"] | antigens["validation"])
    assert {name: len(found) for name, found in antigens.items()} == data.report["num_antigens"]
    assert any("split by antigen" in note for note in data.report["notes"])
    assert data.report["warnings"] == []
    data = load(tmp_path, data={"split": "random"})
    assert any("have an antigen that is trained on" in warning for warning in data.report["warnings"])
    assert data.report["leaks"]["columns"]["antigen"]["num_test_sequences_in_train"] > 0


def test_training_rows_alone_are_filtered_and_then_limited_and_that_is_said(tmp_path):
    labelled = {"explicit": {"label_column"}, "data": {"label_column": "pKd"}}
    data = load(tmp_path, min_affinity=7.0, **labelled)
    assert {*data.affinities("train")} == {8.0, 9.0}
    assert {*data.affinities("test")} == {5.0, 6.0, 7.0, 8.0, 9.0}
    assert any("training rows: 32 of 80 rows are used" in note for note in data.report["notes"])
    labelled["data"]["max_train_samples"] = 20
    few = load(tmp_path, min_affinity=7.0, max_validation_samples=3, **labelled)
    assert few.report["sizes"] == {"train": 20, "validation": 3, "test": 10}
    assert min(few.affinities("train")) > 7
    assert sum("a random" in note for note in few.report["notes"]) == 2
    unknown = load(tmp_path, min_affinity=7.0)
    assert unknown.affinities("train") is None
    assert len(unknown.splits["train"]) == 80


def test_a_filter_that_leaves_nothing_or_one_affinity_is_refused(tmp_path):
    given = {"explicit": {"label_column"}, "data": {"label_column": "pKd"}}
    with pytest.raises(DataError, match=r"pKd` > 9.5.*training rows: 0 of 80 rows are used"):
        load(tmp_path, min_affinity=9.5, **given)
    with pytest.raises(DataError, match="all 16 training labels are 9, so there is nothing to learn"):
        load(tmp_path, min_affinity=8.5, **given)


def test_intervals_resample_clusters_or_groups_of_antigens_where_each_has_one(tmp_path):
    def find_column(**given):
        data = load(tmp_path, **given)
        return data.find_groups(data.antibodies("test").antigens).column

    assert find_column() == "antigen"
    assert find_column(data={"split": "cluster", "cluster_identity": 0.95}, table=make_table(60, 1)) == "cluster"
    rows = [{**row, "family": str(i % 20)} for i, row in enumerate(make_table(40, 1))]
    assert find_column(table=Dataset.from_list(rows), data={"group_column": "family"}) == "family"
    twice = [{**row, "family": str(i)} for i, row in enumerate([*rows, *rows])]
    assert find_column(table=Dataset.from_list(twice), data={"group_column": "family"}) == "antigen"


def test_heavy_chains_alone_and_rows_without_a_light_chain(tmp_path):
    assert {*load(tmp_path, light_column="").antibodies("train").light} == {None}
    table = make_table().to_list()
    mixed = Dataset.from_list([{**row, "light": "" if i % 5 == 0 else row["light"]} for i, row in enumerate(table)])
    data = load(tmp_path, table=mixed, may_lack_light=True)
    assert None in data.antibodies("train").light
    assert not data.needs_light
    assert data.report["missing_chains"]["light"]["train"] == 16
    with pytest.raises(DataError, match="light"):
        load(tmp_path, table=mixed)


def test_what_a_generator_cannot_do_and_bad_rows_are_refused(tmp_path):
    for explicit, data, says in (
        ({"sequence_columns"}, {}, "give --antigen_column, --heavy_column and --light_column"),
        ({"missing_chains"}, {}, "--may_lack_light"),
        ({"task"}, {"task": "classification"}, "is an affinity, a number"),
        ((), {"label_column": ["pKd", "tm"]}, "--label_column pKd tm: a generator learns one affinity"),
        ((), {"streaming": True}, "are read at once"),
        ({"too_long"}, {"too_long": "truncate"}, "only error is allowed"),
    ):
        with pytest.raises(ArgumentError, match=says):
            load(tmp_path, explicit=explicit, data=data)
    table = make_table(20, 1).to_list()
    table[3]["heavy"] = "EVQ1"
    with pytest.raises(DataError, match="row 4, column 'heavy'"):
        load(tmp_path, table=Dataset.from_list(table))
    data = load(tmp_path, table=Dataset.from_list(table), data={"bad_rows": "drop"})
    assert data.report["rows_rejected"] == 1
    assert (tmp_path / "rejected_rows.csv").is_file()


def settle(tmp_path, stage, *explicit, **given):
    model_args, data_args = GeneratorArguments(), DataArguments()
    args = FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)
    return resolve_stage(stage, model_args, data_args, args, explicit), model_args, data_args, args


def test_a_stage_sets_what_the_user_did_not(tmp_path):
    changed, model_args, data_args, args = settle(tmp_path, 2, "num_train_epochs", num_train_epochs=3)
    assert (model_args.size, data_args.max_train_samples, args.num_train_epochs) == ("small", 10_000, 3)
    assert (args.early_stopping_patience, args.load_best_model_at_end) == (5, True)
    assert "num_train_epochs" not in changed


def test_the_learning_rate_goes_by_architecture_and_width_unless_it_was_given(tmp_path):
    esm = {"architecture": "esm", "antigen_encoder": "e", "encoder_training": "lora"}
    for stage, given, rates in (
        (1, {}, (0.01, None)),  # an LSTM of 128
        (3, {"architecture": "light"}, (0.00075, None)),
        (2, esm, (0.0015, 0.0003)),
    ):
        args = FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.7)
        model_args = GeneratorArguments(**given)
        resolve_stage(stage, model_args, DataArguments(), args, ("learning_rate",))
        assert args.learning_rate == 0.7
        resolve_stage(stage, model_args, DataArguments(), args, ())
        assert (args.learning_rate, args.encoder_learning_rate) == rates


def test_arguments_that_cannot_be_are_refused(tmp_path):
    for given, says in (
        ({"stage": "4"}, "stage"),
        ({"architecture": "esm"}, "needs one, such as facebook"),
        ({"antigen_encoder": "x"}, "belongs to --architecture esm"),
        ({"encoder_training": "lora"}, "only acts with --architecture esm"),
        ({"architecture": "transformer", "attend": True}, "only acts with --architecture lstm"),
        ({"heavy_column": "antigen"}, "name different columns"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"num_judged": 0}, "at least 1"),
        ({"gates": {"valid": float("nan")}}, "finite"),
        ({"gates": {"correlation": 0.5}}, "stage 1 has no 'correlation'; it has token_loss, "),
        ({"gates": "valid"}, "names with numbers"),
        ({"gates": {"valid": "high"}}, "names with numbers"),
    ):
        with pytest.raises(ArgumentError, match=says):
            GeneratorArguments(**given)
    with pytest.raises(ArgumentError, match="of one stage"):
        check_auto(settle(tmp_path, 1, resume="out/checkpoint-5")[-1])


ROWS = AntibodyRows.of_columns(HEAVIES, LIGHTS, ANTIGENS)


def make_data(has_affinities: bool = False) -> PairData:
    train = make_demo_pairs(20)
    if has_affinities:
        train = train.add_column("label", [6.0, 8.0] * 10)
    return PairData(DatasetDict({"train": train}), "antigen", "heavy", "light", has_affinities, {})


def make_training(tmp_path, **given) -> FastTrainingArguments:
    cache = {"embedding_cache_dir": str(tmp_path / "cache"), "disable_tqdm": True}
    return FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **cache, **given)


def test_rows_become_token_columns_and_a_budget_holds_for_antigens_and_antibodies_together():
    inputs = Inputs()
    tokens = inputs.tokenize(ROWS, [7.0 if one is None else one for one in AFFINITIES])
    assert tokens.column_names == ["input_ids", "labels", "affinity", "length"]
    assert np.isnan(inputs.tokenize(ROWS)["affinity"][:]).all()
    # An antigen of 18 with two framing tokens; 9 and 5 residues, a separator and an end; and so on.
    counted = count_tokens(tokens, inputs.collator)
    assert counted.tolist() == [[20, 16], [5, 4], [20, 9], [9, 12]]
    assert tokens["length"][:] == counted.sum(1).tolist()
    for batch in TokenBudgetBatchSampler(counted, 72, seed=0):
        made = inputs.collator([tokens[i] for i in batch])
        assert made["labels"].numel() + len(batch) * made["input_ids"].shape[1] <= 72


def test_affinities_of_training_set_the_scale_of_the_model_and_adapters_are_asked_for_where_they_are(tmp_path):
    args = GeneratorArguments(**SIZES)
    config = build_generator(args, make_training(tmp_path), make_data(has_affinities=True)).config
    assert (config.label_mean, config.label_std, config.unknown_affinity_dropout) == (7.0, 1.0, 0.1)
    assert build_generator(args, make_training(tmp_path), make_data()).config.unknown_affinity_dropout == 0.0
    with pytest.raises(ArgumentError, match="--encoder_training lora"):
        build_generator(args, make_training(tmp_path, use_peft=True), make_data())


SIZES = {"d_model": 16, "d_ff": 24, "hidden_size": 12, "num_heads": 2, "size": "tiny"}


def test_a_frozen_encoder_reads_each_antigen_once_and_batches_carry_its_states(tmp_path, demo_encoders, monkeypatch):
    args = GeneratorArguments(architecture="esm", antigen_encoder=demo_encoders[1], **SIZES)
    training, data = make_training(tmp_path), make_data()
    model = build_generator(args, training, data)
    read: list[int] = []
    plain = PretrainedEncoder.forward

    def count(self, input_ids, *given, **named):
        read.append(len(input_ids))
        return plain(self, input_ids, *given, **named)

    monkeypatch.setattr(PretrainedEncoder, "forward", count)
    antigens = data.antibodies("train").antigens
    inputs = build_inputs(model, training, [*antigens, *antigens])
    assert sum(read) == 20
    tokens = inputs.tokenize(data.antibodies("train"))
    batch = inputs.collator([tokens[i] for i in range(4)])
    with torch.no_grad():
        live = model.encode(batch["encoder_outputs"][0].new_tensor(tokens["input_ids"][:4]).long())
    torch.testing.assert_close(batch["encoder_outputs"][0], live.last_hidden_state)
    assert "input_ids" not in batch
    build_inputs(model, training, antigens)
    assert sum(read) == 20 + 4  # those of the comparison; the second time all were there


@pytest.mark.parametrize("training_of_encoder", ["full", "lora"])
def test_a_generator_whose_encoder_trained_needs_nothing_but_its_folder(tmp_path, demo_encoders, training_of_encoder):
    encoder = shutil.copytree(demo_encoders[1], tmp_path / "encoder")
    args = GeneratorArguments(
        architecture="esm", antigen_encoder=str(encoder), encoder_training=training_of_encoder, **SIZES
    )
    training, data = make_training(tmp_path / "run"), make_data()
    model = build_generator(args, training, data).eval()
    inputs = build_inputs(model, training, [])
    model.save_pretrained(tmp_path / "model")
    inputs.collator.save_pretrained(tmp_path / "model")
    settings = {"num_samples": 2, "seed": 3, "max_new_tokens": 12, "show_progress": False}
    expected = sample_pairs(model, inputs.antigen_tokenizer, ANTIGENS, **settings)
    shutil.rmtree(encoder)
    assert sample_pairs(*load_generator(tmp_path / "model", device="cpu"), ANTIGENS, **settings) == expected


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
A100 = ("--per_device_train_batch_size", "128", "--per_device_eval_batch_size", "256")
CARDS = {"a100-80gb": ("bf16", 1, A100), "t4": ("fp16", 8, ())}  # half precision, passes of a step, flags


@pytest.mark.parametrize("card", CARDS)
def test_the_configuration_file_is_stage_3_on_a_frozen_encoder_as_its_card_can_train_it(card, tmp_path):
    precision, passes, flags = CARDS[card]
    words = ["--config", str(CONFIGS / "generate_antibody.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    task = find_task("generation")
    parser, (model_args, data_args, args) = parse_command(task.all_arguments, task.defaults, None, [*words, *flags])
    resolve_stage(int(model_args.stage), model_args, data_args, args, parser.explicit)
    resolve_columns(model_args, data_args, parser.explicit)
    assert (model_args.stage, model_args.size, model_args.encoder_training) == ("3", "full", "frozen")
    assert args.effective_batch_size == args.per_device_train_batch_size * passes == 128
    assert (args.num_train_epochs, args.early_stopping_patience) == (50, 5)  # of the stage
    assert data_args.cluster_column == "antigen"
    # Without weights, on an encoder of ESM-2 35M's shape.
    shape = EsmConfig(vocab_size=33, hidden_size=480, num_hidden_layers=12, num_attention_heads=20, pad_token_id=1)
    spec = {"name_or_path": model_args.antigen_encoder, "config": shape.to_dict(), "training": "frozen"}
    with torch.device("meta"):
        model = AntibodyGenerator(GeneratorConfig.of_size(model_args.architecture, "full", antigen_encoder=spec))
    plan = make_plan(args, model, hardware=describe_hardware(card))
    assert [one.name for one in plan.decisions if one.status == "refused"] == []
    assert plan["precision"].status == "applied"
    assert precision in plan["precision"].reason
