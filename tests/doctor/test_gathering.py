"""What is found out is what the run itself would meet, and nothing is left behind."""

import pytest
from doctored import gather_facts, main, names
from inside import DoctorArguments, MaskedLMArguments

from hf_ext.data import DataArguments, make_demo_table
from hf_ext.doctor import command
from hf_ext.doctor.command import guess_task
from hf_ext.doctor.machine import read_machine
from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.property import AffinityArguments
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
COLUMNS = ["heavy", "light", "antigen"]


def write_table(path, num_rows: int = 60, **columns) -> DataArguments:
    table = make_demo_table(num_rows=num_rows)
    for name, values in columns.items():
        table = table.remove_columns(name) if name in table.column_names else table
        table = table.add_column(name, values)
    table.to_csv(str(path))
    return DataArguments(dataset_name=str(path), sequence_columns=COLUMNS, label_column="pKd")


def test_the_examples_of_its_help_are_about_the_task_whose_flags_they_have():
    lines = [line.split() for line in command.__doc__.splitlines() if line.startswith("    hf-ext doctor")]
    tasks = ["affinity", "affinity", "masked_lm", "generation"]
    assert [guess_task(words[2:]) for words in lines] == tasks
    assert guess_task(["--stage", "1", "--hidden_size", "64"]) == "generation"


def towers(demo_encoders, *trainings: str) -> AffinityArguments:
    return AffinityArguments(
        encoders=list(demo_encoders),
        tower_inputs=["heavy,light", "antigen"],
        tower_training=list(trainings),
        head_sizes=[8],
        head_dropout=0.0,
    )


def test_what_passes_is_the_tokens_of_each_distinct_sequence_once_and_of_all_rows_in_an_epoch(tmp_path, demo_encoders):
    data = write_table(tmp_path / "data.csv")
    facts = gather_facts(model=towers(demo_encoders, "frozen", "full"), data=data)
    table = make_demo_table(num_rows=60)
    antibody, antigen = main(facts).stage.parts
    chains = {chain for column in ("heavy", "light") for chain in table[column][:]}
    assert antibody.num_distinct == len(chains)
    assert antibody.stored_bytes == len(chains) * antibody.width * 4
    # two special tokens about each sequence; 80 % of the rows train
    assert main(facts).stage.num_rows == {"train": 48, "validation": 6, "test": 6}
    row = len(table["heavy"][0]) + len(table["light"][0]) + len(table["antigen"][0]) + 6
    assert main(facts).stage.num_tokens == 48 * row
    assert main(facts).stage.longest == row
    assert (antibody.inputs_per_row, antigen.inputs_per_row) == (2, 1)
    assert antigen.num_distinct == len(set(table["antigen"][:]))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("card", ["T4", "A100", "H100", "cpu"])
@pytest.mark.parametrize("trainings", [("frozen", "frozen"), ("lora", "full")])
def test_the_plan_is_that_of_the_real_model(make_affinity, demo_encoders, tmp_path, card, trainings):
    data = write_table(tmp_path / "data.csv")
    facts = gather_facts(card, model=towers(demo_encoders, *trainings), data=data, use_peft="lora" in trainings)
    assert facts.dry_run.problems == []
    model, collator = make_affinity(*trainings)
    rows = make_demo_table(num_rows=60).rename_column("pKd", "label").select(range(48))
    real = make_plan(facts.args, model, rows, collator, describe_hardware(card))
    without_counts = {"embedding_cache", "batch_size", "length_grouping", "packing", "attention"}  # say numbers of rows
    for found, expected in zip(main(facts).plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status) == (expected.name, expected.status)
        assert found.reason == expected.reason or found.name in without_counts
    other = describe_hardware("T4" if card != "T4" else "H100")
    changed = make_plan(facts.args, model, rows, collator, other)
    assert [d.reason for d in changed.decisions] != [d.reason for d in main(facts).plan.decisions]


@pytest.mark.parametrize(
    ("columns", "message"), [({"pKd": ["strong"] * 60}, "strong"), ({"heavy": ["EVQL1"] * 60}, "heavy")]
)
def test_rows_that_the_run_would_refuse_stop_it_here(demo_encoders, tmp_path, columns, message):
    data = write_table(tmp_path / "data.csv", **columns)
    facts = gather_facts(model=towers(demo_encoders, "frozen"), data=data)
    assert ("data", "stops") in names(facts)
    assert message in facts.dry_run.problems[0].text


def test_a_file_that_is_not_there_stops_the_run(demo_encoders, tmp_path):
    write_table(tmp_path / "data.csv")
    data = DataArguments(dataset_name=str(tmp_path / "date.csv"), sequence_columns=COLUMNS, label_column="pKd")
    facts = gather_facts(model=towers(demo_encoders, "frozen"), data=data)
    assert ("data", "stops") in names(facts)
    assert "data.csv" in facts.dry_run.problems[0].text  # the nearest name
    assert main(facts).stage.num_rows == {}
    assert "not known" in main(facts).times.basis


def test_rows_above_a_length_limit_stop_the_run(demo_encoders, tmp_path):
    data = write_table(tmp_path / "data.csv")
    data.max_residues, data.too_long = 20, "error"
    assert ("data", "stops") in names(gather_facts(model=towers(demo_encoders, "frozen"), data=data))
    data.too_long = "truncate"
    facts = gather_facts(model=towers(demo_encoders, "frozen"), data=data)
    assert facts.dry_run.problems == []
    assert main(facts).stage.longest == 3 * 22  # three inputs of 20 residues and two special tokens


def test_an_encoder_of_the_hub_that_cannot_be_read_stops_the_run_and_its_estimate(tmp_path):
    model = AffinityArguments(encoders=["nobody/no-such-encoder"])
    facts = gather_facts(model=model, data=write_table(tmp_path / "data.csv"))
    assert ("model", "stops") in names(facts)
    assert "nobody/no-such-encoder" in facts.dry_run.problems[0].text
    assert (facts.main, facts.total_seconds) == (None, None)


def test_a_dataset_of_the_hub_is_left_alone():
    facts = gather_facts(
        data=DataArguments(dataset_name="nobody/no-such-data"), model=MaskedLMArguments(model_size="esm2_8M")
    )
    assert names(facts) == []
    assert "not downloaded" in facts.dry_run.notes[0]


@pytest.fixture
def stream(tmp_path):
    """A model and a stream of 40 proteins."""
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">p{i}\n{'ACDEFGHIKL' * 3}\n" for i in range(40)))
    data = DataArguments(dataset_name=str(path), streaming=True, split_sizes=[0.5, 0.5, 0.0])
    return {"model": MaskedLMArguments(model_size="demo"), "data": data}


def test_a_stream_is_estimated_from_its_first_rows_and_its_steps(stream):
    facts = gather_facts("t4", **stream, max_steps=100, per_device_train_batch_size=4)
    assert facts.dry_run.problems == []
    rows = main(facts).stage.num_rows["train"]
    assert main(facts).stage.num_tokens == 32 * rows
    assert (main(facts).schedule.steps, main(facts).schedule.epochs) == (100, pytest.approx(400 / rows))


def test_a_stream_without_a_number_of_steps_stops(stream):
    (finding,) = gather_facts(**stream).dry_run.problems
    assert (finding.name, finding.level, finding.remedy) == ("stream", "stops", "--max_steps N")


def test_folders_that_cannot_be_made_are_seen(tmp_path):
    (tmp_path / "file").write_text("")
    args = FastTrainingArguments(output_dir=str(tmp_path / "file" / "run"), report_to="none")
    args.embedding_cache_dir = str(tmp_path / "new" / "cache")
    machine = read_machine(args, "t4")
    assert (machine.is_writable["output_dir"], machine.is_writable["cache_dir"]) == (False, True)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_what_is_no_time_to_measure_is_refused(seconds):
    with pytest.raises(ArgumentError, match=f"measure_seconds={seconds}"):
        DoctorArguments(measure_seconds=seconds)


@pytest.mark.parametrize("trainings", [("frozen", "frozen"), ("lora", "full")])
def test_checkpoints_are_as_large_as_the_run_itself_bounds_them_and_as_what_it_writes(
    make_affinity, demo_rows, demo_encoders, tmp_path, trainings
):
    model, collator = make_affinity(*trainings)
    args = FastTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    trainer = FastTrainer(model, args, collator, demo_rows)
    trainer.create_optimizer()
    real = trainer.checkpoint_sizes()
    data = write_table(tmp_path / "data.csv")
    facts = gather_facts(model=towers(demo_encoders, *trainings), data=data, use_peft="lora" in trainings)
    found = main(facts).checkpoint
    assert (found.weights, found.optimizer) == (pytest.approx(real.weights, rel=1e-3), real.optimizer)
    trainer.save_model()
    written = (tmp_path / "run" / "model.safetensors").stat().st_size
    assert written <= real.weights <= written + 2**17  # weights stored by reference are counted by neither
    trainer.end()


def test_an_output_folder_that_the_run_would_refuse_stops_it_here(demo_encoders, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"another program's")
    facts = gather_facts(model=towers(demo_encoders, "frozen"), output_dir=str(tmp_path / "foreign"))
    assert ("output_dir", "stops") in names(facts)
    facts = gather_facts(model=towers(demo_encoders, "frozen"), output_dir=str(tmp_path / "new"), num_train_epochs=0)
    assert ("steps", "stops") in names(facts)
    assert not (tmp_path / "new").exists()
