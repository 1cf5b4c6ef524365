"""`--numeric_columns` and `--category_columns`: what rows become, who learns from them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from launches import ONE_CPU, TWO_CPUS, run_recipe
from resuming_runs import Kill, Killed
from run_outcomes import same_tensors
from tiny_affinity import make_model

from hf_ext.baselines import pooled_features
from hf_ext.data import DataArguments, NumberColumns, load_data
from hf_ext.errors import ArgumentError, CheckpointError, DataError
from hf_ext.property import TASK, AffinityPredictor, build_collator
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ALONE = "ridge on columns alone"
FLAGS = "--numeric_columns ph dose --category_columns isotype"
QUICK = (
    "--num_train_epochs 3 --learning_rate 0.01 --per_device_train_batch_size 16 "
    "--disable_tqdm true --use_cpu true --without encoder_precision --split_column part"
)
SINGLE = "--num_train_epochs 20 --head_sizes 16 --head_dropout 0"
LABELS = {
    "regression": ["label"],
    "regression of several": ["warm", "cold"],
    "classification": ["class"],
    "multilabel": ["basic", "acidic"],
}
STATES = str.maketrans("ACDEFGHIKLMNPQRSTVWY", "HHHHHHHEEEEEEECCCCCC")
TRAIN = [
    {"ph": "1", "dose": "2", "isotype": "b"},
    {"ph": "3", "dose": "", "isotype": "a"},
    {"ph": "3", "dose": "6", "isotype": " b"},
    {"ph": "1.0", "dose": "NA", "isotype": "7.0"},
]


def make_table(number: int = 150) -> pd.DataFrame:
    """Proteins of which no residue matters: `ph` decides the labels; a third has a dose."""
    generator = np.random.default_rng(0)
    letters = np.array([*"ACDEFGHIKLMNPQRSTVWY"])
    sequences = ["".join(letters[generator.integers(0, 20, 8 + i % 8)]) for i in range(number)]
    ph = generator.uniform(4, 9, number).round(2)
    table = pd.DataFrame(
        {"sequence": sequences, "ph": ph, "isotype": [("G1", "G2", "A")[i % 3] for i in range(number)]}
    )
    table["dose"] = [str(i % 7) if i % 3 == 0 else "" for i in range(number)]
    table["label"] = 2 * ph + generator.normal(0, 0.1, number)
    table["warm"] = table["label"]
    table["cold"] = -table["label"]
    table["class"] = np.where(ph > 6.5, "stable", "loose")
    table["basic"] = (ph > 6.5).astype(int)
    table["acidic"] = (ph < 6).astype(int)
    table["part"] = ["train" if i < 90 else "valid" if i < 115 else "test" for i in range(number)]
    return table


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_encoders):
    """Trains once with these words on the table; its results, and its folder."""
    root, done = tmp_path_factory.mktemp("numbers"), {}
    make_table().to_csv(root / "rows.csv", index=False)

    def trained(words: str = "--label_column label") -> tuple[dict[str, Any], Path]:
        if words not in done:
            folder = tmp_path_factory.mktemp("run")
            own = f"--dataset_name {root}/rows.csv --output_dir {folder} --encoders {demo_encoders[1]}"
            given = f"{own} --embedding_cache_dir {root}/cache {QUICK} {FLAGS} {words}"
            done[words] = TASK.main(given.split()), folder
        return done[words]

    return trained


def spearman(results: dict[str, Any], name: str = "model") -> float:
    return results["test"]["scores"][name]["spearman"]["value"]


def test_numbers_are_standardised_and_categories_one_hot_by_training_rows() -> None:
    numbers = NumberColumns.fit(TRAIN, ["ph", "dose"], ["isotype"])
    expected = [  # doses of 2 and 6: mean 4, deviation 2; then whether it is missing; then 7, a, b
        [-1, -1, 0, 0, 0, 1],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
        [-1, 0, 1, 1, 0, 0],
    ]
    np.testing.assert_allclose(numbers.matrix(TRAIN), expected, rtol=1e-6)
    assert len(numbers) == 6
    again = NumberColumns.from_state(json.loads(json.dumps(numbers.state())))
    new = [{"ph": 5, "dose": None, "isotype": "E"}, {"ph": "0", "dose": "4", "isotype": 7}]
    np.testing.assert_allclose(again.matrix(new), [[3, 0, 1, 0, 0, 0], [-2, 0, 0, 1, 0, 0]], rtol=1e-6)
    assert again.matrix(Dataset.from_list(TRAIN)).tolist() == numbers.matrix(TRAIN).tolist()
    assert NumberColumns.fit([{"ph": "7"}] * 3, ["ph"], []).matrix([{"ph": "7"}]).tolist() == [[0]]


@pytest.mark.parametrize("planted", ["test", "valid", "train"])
def test_nothing_of_other_rows_enters_scale_or_categories(planted: str, tmp_path: Path) -> None:
    table = make_table()
    found = []
    for name in ("clean", "planted"):
        if name == "planted":
            rows = table["part"] == planted
            table.loc[rows, "ph"] = 1000.0
            table.loc[rows & (table.index % 2 == 1), "isotype"] = "E"
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        columns = {"numeric_columns": ["ph"], "category_columns": ["isotype"], "split_column": "part"}
        args = DataArguments(dataset_name=str(tmp_path / f"{name}.csv"), **columns)
        found.append(load_data(args, output_dir=None, seed=0).numbers)
    assert (found[0] == found[1]) == (planted != "train")


def test_a_mixed_head_learns_from_a_column_and_the_verdict_names_the_ridge_on_columns(run) -> None:
    results, folder = run()
    assert spearman(results) > 0.9
    assert spearman(results, ALONE) > 0.95
    assert spearman(results, "ridge on embeddings") > spearman(results, "3-mer ridge") + 0.3
    assert results["test"]["baselines"][ALONE]["num_rows"] == 90
    log, report = (folder / "run.log").read_text(), (folder / "report.html").read_text()
    assert "column 'isotype' is read as one of 3 categories of training: A, G1, G2" in log
    assert "column 'dose' is read as a number, 0 to 6 in training; 60 lack it" in log
    assert "Ridge on embeddings reads ph, dose, isotype, too." in log
    assert "is read as a number, 0 to 6 in training" in report
    card = (folder / "README.md").read_text().replace("\\", "")
    assert "sequence, and from ph, dose and isotype." in card
    assert '"ph": "7"' in card


@pytest.mark.nightly
def test_the_doctor_says_what_columns_are_read_as(demo_encoders, tmp_path: Path, capsys) -> None:
    make_table().to_csv(tmp_path / "rows.csv", index=False)
    given = f"--dataset_name {tmp_path}/rows.csv --encoders {demo_encoders[1]} --output_dir {tmp_path}/out {QUICK}"
    assert commands.examine(f"{given} {FLAGS} --tower_training lora".split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "column 'dose' is read as a number, 0 to 6 in training; 60 lack it" in said


def test_a_model_predicts_what_its_run_did_and_reads_its_columns_by_itself(run, tmp_path: Path) -> None:
    results, folder = run()
    ran = pd.read_csv(folder / "predictions.csv", dtype=str, keep_default_na=False)
    new = ran[["sequence", "ph", "dose", "isotype"]]
    new.to_csv(tmp_path / "new.csv", index=False)
    own = f"--model {folder} --use_cpu true --embedding_cache_dir {tmp_path}/cache"
    commands.predict(f"{own} --dataset_name {tmp_path}/new.csv --output {tmp_path}/out.csv".split())
    expected = ran["prediction"].astype(float)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv")["prediction"], expected, atol=1e-4)
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    assert predictor.columns == ["sequence", "ph", "dose", "isotype"]
    np.testing.assert_allclose(predictor.predict(new), expected, atol=1e-4)
    typed = new.assign(ph=new["ph"].astype(float), dose=pd.to_numeric(new["dose"]))
    np.testing.assert_allclose(predictor.predict(typed), expected, atol=1e-4)
    assert np.abs(predictor.predict(new.assign(ph="4")) - expected).max() > 1  # the comparison sees a number
    both = commands.evaluate(f"--models {folder} {folder}/predictions.csv --test_of {folder} --use_cpu true".split())
    assert both["scores"][folder.name]["spearman"]["value"] == pytest.approx(spearman(results), abs=1e-3)
    make_table().iloc[115:].to_csv(tmp_path / "labelled.csv", index=False)
    alone = commands.evaluate(f"--models {folder} --dataset_name {tmp_path}/labelled.csv --use_cpu true".split())
    assert alone["scores"][folder.name]["spearman"]["value"] == pytest.approx(spearman(results), abs=1e-3)


def test_rows_that_a_model_cannot_read_are_refused_and_unknown_categories_said(run, capsys, tmp_path: Path) -> None:
    _, folder = run()
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    row = {"sequence": "MKTAYIAKQR", "ph": 7, "dose": None, "isotype": "G1"}
    for wrong, text in (
        ({"ph": "7,4"}, r"row 1, column 'ph', value '7,4': not a number"),
        ({"ph": "<7"}, r"row 1, column 'ph', value '<7': not a number"),
        ({"ph": None}, r"row 1, column 'ph', value '': missing, which no training row shows"),
        ({"isotype": "NA"}, r"row 1, column 'isotype', value '': missing"),
    ):
        with pytest.raises(DataError, match=text):
            predictor.predict([{**row, **wrong}])
    pd.DataFrame([row]).drop(columns="ph").to_csv(tmp_path / "new.csv", index=False)
    given = f"--model {folder} --dataset_name {tmp_path}/new.csv --output {tmp_path}/out.csv --use_cpu true"
    with pytest.raises(DataError, match=r"there is no column 'ph'\. Columns: sequence, dose, isotype"):
        commands.predict(given.split())
    with pytest.raises(DataError, match="rows have no column 'isotype'"):
        predictor.predict({name: [row[name]] for name in ("sequence", "ph", "dose")})
    with pytest.raises(ArgumentError, match=r"ph dose isotype: .*drop --streaming"):
        commands.predict([*given.split(), "--streaming", "true"])
    predictor.predict([{**row, "isotype": "E"}, row])
    assert "isotype: rows with categories that no training row has (E): 1; they are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"numeric_columns": ["label"]}, "none of --sequence_columns, --numeric_columns"),
        ({"numeric_columns": ["ph"], "category_columns": ["ph"]}, "none of --sequence_columns, --numeric_columns"),
        ({"category_columns": ["part"], "split_column": "part"}, "and --mutation_column"),
        ({"numeric_columns": ["ph"], "sequence_columns": ["numbers"]}, "column 'numbers' is one that"),
        ({"numeric_columns": ["ph"], "streaming": True}, "drop --streaming"),
    ],
)
def test_columns_that_mean_something_else_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DataArguments(**given)


def test_columns_of_which_nothing_is_learned_are_refused(tmp_path: Path) -> None:
    table = make_table().assign(nothing="")
    table.to_csv(tmp_path / "rows.csv", index=False)
    source = {"dataset_name": str(tmp_path / "rows.csv"), "split_column": "part"}
    with pytest.raises(DataError, match="column 'nothing': all 90 training rows lack it"):
        load_data(DataArguments(**source, numeric_columns=["nothing"]), output_dir=None, seed=0)
    with pytest.raises(DataError, match="column 'sequence': 90 categories in 90 training rows; 100 are"):
        NumberColumns.fit(table[:90].to_dict("records"), [], ["sequence"])
    table.assign(label=table["sequence"].str.translate(STATES)).to_csv(tmp_path / "rows.csv", index=False)
    for needs_labels, text in ((False, "ph: nothing reads these without labels"), (True, "name one of sequence ph")):
        with pytest.raises(ArgumentError, match=text):
            load_data(
                DataArguments(**source, numeric_columns=["ph"]), output_dir=None, seed=0, needs_labels=needs_labels
            )


def test_rows_of_one_sequence_at_other_numbers_are_neither_repeats_nor_leaks(tmp_path: Path) -> None:
    rows = make_table(75)
    rows = pd.concat([rows, rows.assign(ph=rows["ph"] + 1, label=rows["label"] + 2)])
    rows.assign(part=make_table()["part"].to_numpy()).to_csv(tmp_path / "rows.csv", index=False)
    source = {"dataset_name": str(tmp_path / "rows.csv"), "split_column": "part"}
    beside, without = (
        load_data(DataArguments(**source, numeric_columns=one), output_dir=None, seed=0).report for one in (["ph"], [])
    )
    assert [one["leaks"]["row"]["num_test_rows_in_train"] for one in (beside, without)] == [0, 35]
    assert [one["repeats"]["num_disagreeing"] for one in (beside, without)] == [0, 75]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words", ["mlp", "gated", "product", "mlp --tower_training lora", "mlp --tower_training full --learning_rate 0.01"]
)
def test_single_networks_and_trained_encoders_learn_from_a_column(words: str, run) -> None:
    results, folder = run(f"--label_column label {SINGLE} --head {words}")
    assert spearman(results) > 0.8
    again = AffinityPredictor.from_pretrained(folder, device="cpu")
    ran = pd.read_csv(folder / "predictions.csv", dtype=str, keep_default_na=False)
    np.testing.assert_allclose(again.predict(ran), ran["prediction"].astype(float), rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LABELS)
def test_each_kind_of_label_learns_from_a_column_and_predicts_so_again(kind: str, run) -> None:
    results, folder = run(f"--label_column {' '.join(LABELS[kind])} --task {kind.partition(' ')[0]}")
    linear = "ridge" if kind.startswith("regression") else "logistic regression"
    metric = results["verdict"]["comparison"]["metric"]
    scores = {name: one[metric]["value"] for name, one in results["test"]["scores"].items()}
    better = min if metric in ("rmse", "nrmse") else max
    for name in ("model", f"{linear} on columns alone"):
        assert better(scores[name], scores[f"3-mer {linear}"]) == scores[name]
    ran = pd.read_csv(folder / "predictions.csv", dtype=str, keep_default_na=False)
    predicted = AffinityPredictor.from_pretrained(folder, device="cpu").logits(ran)
    assert np.isfinite(predicted).all()


@pytest.mark.nightly
def test_a_student_reads_the_columns_that_its_teacher_reads(run) -> None:
    _, teacher = run()
    results, _ = run(f"--label_column label {SINGLE} --head mlp --distill_from {teacher}")
    assert spearman(results) > 0.8


@pytest.fixture
def make(demo_encoders, demo_rows, tmp_path: Path):
    """A trainer on demo rows with a pH, whose scale is that of rows with this factor."""
    ph = [round(4 + i / 12, 2) for i in range(60)]
    rows = demo_rows.select(range(60)).add_column("ph", [*map(str, ph)])

    def build(folder: str, training: str = "frozen", factor: float = 1.0, **given: Any) -> FastTrainer:
        fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 6}
        fixed |= {"per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 3}
        places = {"output_dir": str(tmp_path / folder), "embedding_cache_dir": str(tmp_path / "cache")}
        numbers = NumberColumns.fit([{"ph": factor * one} for one in ph], ["ph"], []).state()
        torch.manual_seed(0)  # of adapters, too
        model = make_model(demo_encoders, training, [[["heavy"], ["light"]], [["antigen"]]], numbers=numbers)
        collator = build_collator(model, DataArguments(sequence_columns=["heavy", "light", "antigen"]))
        return FastTrainer(model, FastTrainingArguments(**places, **fixed, **given), collator, rows)

    return build


def weights(trainer: FastTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_cached_and_live_training_see_the_same_numbers_as_ridges_do(make) -> None:
    cached, live = make("cached", speedups=["embedding_cache"]), make("live", speedups=[])
    seen = []
    for trainer in (cached, live):
        trainer.train()
        hook = trainer.model.head.layers.register_forward_pre_hook(lambda layers, given: seen.append(given[0].clone()))
        trainer.predict(trainer.train_dataset)
        hook.remove()
    assert cached.plan.applied("embedding_cache")
    found, wanted = (torch.cat([p.flatten() for p in t.model.head.parameters()]) for t in (live, cached))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    ph = np.array([float(one) for one in live.train_dataset["ph"][:]])
    head = cached.model.head
    given = torch.from_numpy(pooled_features(cached, cached.train_dataset))
    standard = (given - head.input_mean) * head.input_scale
    np.testing.assert_allclose(standard[:, -1], (ph - ph.mean()) / ph.std(), atol=1e-5)
    torch.testing.assert_close(torch.cat(seen)[:60], standard, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", ["frozen", "lora"])
def test_a_killed_run_continues_exactly_and_another_scale_is_another_run(make, training: str) -> None:
    given = {"speedups": ["embedding_cache"], "training": training}
    whole = make("whole", **given)
    whole.train()
    killed = make("killed", **given)  # now: a trainer that is made seeds what dropout draws
    killed.add_callback(Kill(4, accumulation=1))
    with pytest.raises(Killed):
        killed.train()
    killed.close()
    other = make("killed", factor=2.0, **given, resume="auto")
    with pytest.raises(CheckpointError, match=r"numbers\.numeric\.ph\.mean"):
        other.train()
    other.close()
    again = make("killed", **given, resume="auto")
    again.train()
    assert same_tensors(weights(whole), weights(again))


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_train_as_one(demo_encoders, tmp_path: Path) -> None:
    make_table().to_csv(tmp_path / "rows.csv", index=False)
    steps = "--max_steps 5 --lora_dropout 0 --tower_training lora --eval_strategy no --save_strategy no --head mlp"
    words = f"{QUICK} {FLAGS} {SINGLE} {steps} --load_best_model_at_end false --encoders {demo_encoders[1]}"
    found = []
    for launch, batch in ((TWO_CPUS, 8), (ONE_CPU, 16)):
        folder = tmp_path / launch.kind
        own = f"--dataset_name {tmp_path}/rows.csv --per_device_train_batch_size {batch}"
        facts = run_recipe(launch, folder, "max_speed.py", *f"{words} {own}".split())
        assert len({one["digest"] for one in facts}) == 1
        found.append(pd.read_csv(folder / "output" / "predictions.csv")["prediction"])
    np.testing.assert_allclose(*found, rtol=1e-3)
