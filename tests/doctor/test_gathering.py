"""What is found out is what the run itself would meet, and nothing is left behind."""

import pytest
import torch
from doctored import look, names

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import make_demo_table
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.doctor.machine import read_machine
from hf_ext.embeddings.store import EmbeddingStore
from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.plan import make_plan
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "light", "antigen"]


def write_table(path, num_rows: int = 60, **columns) -> DataArguments:
    table = make_demo_table(num_rows=num_rows)
    for name, values in columns.items():
        table = table.remove_columns(name) if name in table.column_names else table
        table = table.add_column(name, values)
    table.to_csv(str(path))
    return DataArguments(dataset_name=str(path), sequence_columns=COLUMNS, label_column="pKd")


def towers(demo_encoders, *trainings: str) -> AffinityArguments:
    return AffinityArguments(
        encoders=list(demo_encoders),
        tower_inputs=["heavy,light", "antigen"],
        tower_training=list(trainings),
        head_sizes=[8],
        head_dropout=0.0,
    )


@pytest.mark.nightly
def test_tokens_are_those_of_each_distinct_sequence_once():
    table = make_demo_table()
    antibody, antigen = look().work.encoders
    chains = {chain for column in ("heavy", "light") for chain in table[column][:]}
    assert antibody.num_distinct == len(chains)
    assert antibody.distinct.total == sum(len(chain) + 2 for chain in chains)
    assert antigen.distinct.squares == sum((len(chain) + 2) ** 2 for chain in set(table["antigen"][:]))
    # 3,000 rows, 80 % of them train; heavy chains of the demo have 88 residues, light ones 76
    assert antibody.train.total == 2400 * (len(table["heavy"][0]) + len(table["light"][0]) + 4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("card", ["T4", "A100", "H100", "cpu"])
@pytest.mark.parametrize("trainings", [("frozen", "frozen"), ("lora", "full")])
def test_the_plan_is_that_of_the_real_model(make_affinity, demo_encoders, tmp_path, card, trainings):
    data = write_table(tmp_path / "data.csv")
    facts = look(card, model=towers(demo_encoders, *trainings), data=data, use_peft="lora" in trainings)
    assert facts.problems == []
    model, collator = make_affinity(*trainings)
    rows = make_demo_table(num_rows=60).rename_column("pKd", "label").select(range(48))
    real = make_plan(facts.args, model, rows, collator, describe_hardware(card))
    without_counts = {"embedding_cache", "batch_size", "length_grouping", "packing", "attention"}  # say numbers of rows
    for found, expected in zip(facts.plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status) == (expected.name, expected.status)
        assert found.reason == expected.reason or found.name in without_counts
    other = describe_hardware("T4" if card != "T4" else "H100")
    changed = make_plan(facts.args, model, rows, collator, other)
    assert [d.reason for d in changed.decisions] != [d.reason for d in facts.plan.decisions]


@pytest.mark.nightly
def test_sizes_come_from_configurations_alone(demo_encoders):
    work = look("h100", model=MaskedLMArguments(model_size="esm2_650M")).work
    assert work.encoders[0].num_parameters == 651_043_254  # of facebook/esm2_t33_650M_UR50D
    assert next(work.model.parameters()).is_meta
    continued = look("h100", model=MaskedLMArguments(model_name_or_path=demo_encoders[1])).work
    assert continued.encoders[0].config["num_hidden_layers"] == 2


@pytest.mark.nightly
def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = look(None, measure_seconds=0.1, output_dir=str(tmp_path / "out"), embedding_cache_dir=str(tmp_path / "emb"))
    assert facts.seconds
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_on_this_machine_the_rate_is_measured():
    facts = look(None, measure_seconds=0.2, use_cpu=True)
    assert "measured here on one layer" in facts.rate_basis
    assert [what for what, _ in facts.seconds] == ["encoding 739 distinct inputs once", "training, 900 passes"]
    assert all(0 < least < most for _, (least, most) in facts.seconds)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pKd": ["strong"] * 60}, "strong"),
        ({"heavy": ["EVQL1"] * 60}, "heavy"),
    ],
)
def test_rows_that_the_run_would_refuse_stop_it_here(demo_encoders, tmp_path, columns, message):
    data = write_table(tmp_path / "data.csv", **columns)
    facts = look(model=towers(demo_encoders, "frozen"), data=data)
    assert ("data", "stops") in names(facts)
    assert message in facts.problems[0].text
    assert "--label_column" in facts.problems[0].remedy


def test_a_file_that_is_not_there_stops_the_run(demo_encoders, tmp_path):
    write_table(tmp_path / "data.csv")
    data = DataArguments(dataset_name=str(tmp_path / "date.csv"), sequence_columns=COLUMNS, label_column="pKd")
    facts = look(model=towers(demo_encoders, "frozen"), data=data)
    assert ("data", "stops") in names(facts)
    assert "data.csv" in facts.problems[0].text  # the nearest name
    assert facts.work.num_rows == {}
    assert "not known" in facts.why_no_time


def test_rows_above_a_length_limit_stop_the_run(demo_encoders, tmp_path):
    data = write_table(tmp_path / "data.csv")
    data.max_residues = 20
    assert ("data", "stops") in names(look(model=towers(demo_encoders, "frozen"), data=data))
    data.too_long = "truncate"
    facts = look(model=towers(demo_encoders, "frozen"), data=data)
    assert facts.problems == []
    assert facts.work.encoders[0].train.longest == 2 * 22  # two inputs of 20 residues and two special tokens


def test_an_encoder_of_the_hub_that_cannot_be_read_stops_the_run_and_its_estimate(tmp_path):
    model = AffinityArguments(encoders=["nobody/no-such-encoder"])
    facts = look(model=model, data=write_table(tmp_path / "data.csv"))
    assert ("model", "stops") in names(facts)
    assert "nobody/no-such-encoder" in facts.problems[0].text
    assert (facts.work, facts.seconds, facts.why_no_time) == (None, [], "the model could not be read")


def test_a_dataset_of_the_hub_is_left_alone():
    facts = look(data=DataArguments(dataset_name="nobody/no-such-data"), model=MaskedLMArguments(model_size="esm2_8M"))
    assert names(facts) == []
    assert "not downloaded" in facts.notes[0]


def test_a_stream_is_estimated_from_its_first_rows_and_its_steps(tmp_path):
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">p{i}\n{'ACDEFGHIKL' * 3}\n" for i in range(40)))
    data = DataArguments(dataset_name=str(path), streaming=True, split_sizes=[0.5, 0.5, 0.0])
    shape = MaskedLMArguments(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    facts = look("t4", model=shape, data=data, max_steps=100, per_device_train_batch_size=4)
    assert facts.problems == []
    assert facts.schedule.steps == 100
    rows = facts.work.num_rows["train"]
    assert facts.work.encoders[0].train.total == 32 * rows
    assert facts.schedule.epochs == pytest.approx(400 / rows)


def test_a_stream_without_a_number_of_steps_stops(tmp_path):
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">p{i}\n{'ACDEFGHIKL' * 3}\n" for i in range(40)))
    data = DataArguments(dataset_name=str(path), streaming=True, split_sizes=[0.5, 0.5, 0.0])
    shape = MaskedLMArguments(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    (finding,) = look(model=shape, data=data).problems
    assert (finding.name, finding.level, finding.remedy) == ("stream", "stops", "--max_steps N")


def test_folders_that_cannot_be_made_are_seen(tmp_path):
    (tmp_path / "file").write_text("")
    args = FastTrainingArguments(output_dir=str(tmp_path / "file" / "run"), report_to="none")
    args.embedding_cache_dir = str(tmp_path / "new" / "cache")
    machine = read_machine(args, "t4")
    assert (machine.is_writable["output_dir"], machine.is_writable["cache_dir"]) == (False, True)


@pytest.mark.nightly
def test_what_the_estimate_leaves_out_is_noted(tmp_path):
    EmbeddingStore(tmp_path, {}, (None, "error", 0)).add(["MKT"], torch.ones(1, 2))
    model = AffinityArguments(distill_from="nobody/teacher", loss="mse")
    notes = "\n".join(look(model=model, embedding_cache_dir=str(tmp_path)).notes)
    assert "--distill_from: that model is read by the run alone" in notes
    assert f"What {tmp_path} already holds is not encoded again" in notes
    assert "already holds" not in "\n".join(look(embedding_cache_dir=str(tmp_path / "empty")).notes)


def test_a_negative_time_to_measure_is_refused():
    with pytest.raises(ArgumentError, match="measure_seconds=-1"):
        DoctorArguments(measure_seconds=-1)
