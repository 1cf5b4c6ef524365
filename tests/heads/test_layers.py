"""`--layer`: which layer of an encoder the head reads, by its number, or chosen by rows that were held out."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from doctored import gather_facts, main
from inside import build_affinity_model
from protein_families import FAMILIES, write_family
from transformers import AutoModel, AutoModelForTextEncoding, EsmConfig, EsmModel, EsmTokenizer

from hf_ext.data import ESM_VOCABULARY, STANDARD, DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.heads import choose_layers
from hf_ext.labels import ONE_NUMBER, UNKNOWN, LabelKind, make_kind
from hf_ext.models import AffinityModel, identify_encoder
from hf_ext.property import TASK, AffinityArguments, AffinityPredictor, build_collator

NORMS = {
    **{"esm": "encoder.emb_layer_norm_after", "esmc": "norm", "modernbert": "final_norm"},
    **dict.fromkeys(("t5", "mt5", "umt5"), "encoder.final_layer_norm"),
    "gpt_neox": "final_layer_norm",
}
NUM_ROWS, DEPTH = 240, 3


def make_parts(
    folder: str, layer: str, kind: LabelKind = ONE_NUMBER, **settings: object
) -> tuple[AffinityModel, object]:
    given = AffinityArguments(encoders=[folder], layer=layer, head_sizes=[4], **settings)
    model = build_affinity_model(given, ["sequence"], kind=kind)
    return model.eval(), build_collator(model, DataArguments(sequence_columns=["sequence"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_by_its_number_is_the_hidden_state_of_the_whole_encoder_pooled(name, tmp_path):
    folder = write_family(name, tmp_path)
    model, collator = make_parts(folder, "1")
    batch = collator.encode("sequence", ["ACDEFGHIK", "WYV", "MMKLW"])
    factory = AutoModelForTextEncoding if name in ("t5", "mt5", "umt5") else AutoModel
    whole = factory.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in batch}
        out = whole(**tokens, output_hidden_states=True)
        norm = whole.get_submodule(NORMS[name]) if name in NORMS else torch.nn.Identity()
        first, last = (
            torch.stack([row[mask].mean(0) for row, mask in zip(states, batch["residue_mask"])])
            for states in (norm(out.hidden_states[1]), out.last_hidden_state)
        )
        found = model.encode("sequence", batch)
    torch.testing.assert_close(found, first, rtol=0, atol=1e-5)
    assert (found - last).abs().max() > 1e-3
    kept = sum(p.numel() for p in model.encoders["0"].parameters())
    assert kept < sum(p.numel() for p in whole.parameters())
    # Embeddings of another layer are another entry of the cache; the last by its number is the last.
    keys = [make_parts(folder, layer)[0].config.encoder_specs[0] for layer in ("1", "2", "last")]
    assert len({*map(identify_encoder, keys)}) == 2
    assert identify_encoder(keys[1]) == identify_encoder(keys[2])


@pytest.mark.parametrize("training", ["lora", "full"])
def test_layers_above_are_dropped_where_encoders_train_too_and_come_back_so(training, tmp_path):
    folder = write_family("esm", tmp_path)
    model, collator = make_parts(folder, "1", tower_training=[training])
    model.config.is_scaled = True
    model.save_pretrained(tmp_path / "saved")
    again = AffinityModel.from_pretrained(tmp_path / "saved").eval()
    assert not [name for name in again.state_dict() if ".layer.1." in name]
    batch = {"sequence": collator.encode("sequence", ["ACDEFGHIK", "WYV"])}
    torch.testing.assert_close(again(batch).logits, model(batch).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("layer", "said"), [("3", "--layer 3: .* has 2 layers"), ("first", "--layer first: give a")])
def test_a_layer_that_is_not_there_is_refused(layer, said, tmp_path):
    with pytest.raises(ArgumentError, match=said):
        make_parts(write_family("esm", tmp_path), layer)


def test_the_doctor_counts_the_layers_that_run_alone():
    whole, half = (main(gather_facts(model=AffinityArguments(layer=layer))).stage.parts[0] for layer in ("last", "1"))
    assert half.flops == pytest.approx(whole.flops / 2, rel=0.01)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """An ESM-2 of three layers, of which the second and third drown what the first one put out."""
    folder = tmp_path_factory.mktemp("layers") / "esm"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(ESM_VOCABULARY) + "\n")
    EsmTokenizer(str(folder / "vocab.txt"), model_max_length=1024).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 64}
    ids = {"vocab_size": len(ESM_VOCABULARY), "pad_token_id": 1, "mask_token_id": 32}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "position_embedding_type": "rotary"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = EsmModel(EsmConfig(**sizes, **ids, **plain, initializer_range=0.5), add_pooling_layer=False)
        for layer in model.encoder.layer[1:]:
            layer.output.dense.weight.data *= 100
        model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rows(encoder):
    """Sequences, and by layer a label that is linear in its embeddings; as columns `layer1` to `layer3`."""
    generator = np.random.default_rng(0)
    sequences = ["".join(generator.choice([*STANDARD], generator.integers(8, 14))) for _ in range(NUM_ROWS)]
    columns = {"sequence": sequences, "noise": generator.normal(size=NUM_ROWS)}
    for layer in range(1, DEPTH + 1):
        model, collator = make_parts(encoder, str(layer))
        embeddings = model.encode("sequence", collator.encode("sequence", sequences)).double().numpy()
        worth = ((embeddings - embeddings.mean(0)) / embeddings.std(0)) @ generator.normal(size=16)
        columns[f"layer{layer}"] = worth / worth.std() + 0.2 * columns["noise"]
    return columns


def choose(encoder, rows, label, groups=None, kind=ONE_NUMBER):
    model, collator = make_parts(encoder, "auto", kind)
    table = Dataset.from_dict({"sequence": rows["sequence"], "label": rows[label] if isinstance(label, str) else label})
    splits = {"train": table.select(range(180)), "validation": table.select(range(180, NUM_ROWS))}
    choose_layers(model, collator, splits, groups, SimpleNamespace(seed=0, device=torch.device("cpu")))
    return model


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_the_layer_that_classes_or_several_labels_depend_on_is_found(encoder, rows, task):
    one, other, noise = (np.asarray(rows[name]) for name in ("layer1", "layer3", "noise"))
    names = ("a", "b", "c") if task == "classification" else ("a", "b")
    kind = make_kind(task, names if task == "multilabel" else ("label",), names)

    def labels(worth):
        if task == "classification":
            return np.digitize(worth, [-0.5, 0.5])
        pair = np.stack([worth, 100 * noise], 1) if task == "regression" else np.stack([worth > 0, noise > 2], 1) * 1
        pair[::7, 0] = UNKNOWN
        return pair.tolist()

    assert choose(encoder, rows, labels(one), kind=kind).config.encoder_specs[0].layer == 1
    assert choose(encoder, rows, labels(other), kind=kind).config.encoder_specs[0].layer is None


@pytest.mark.parametrize(("label", "layer"), [("layer1", 1), ("layer3", None), ("noise", None)])
def test_the_layer_that_labels_depend_on_is_found_and_else_the_last_is_kept(encoder, rows, label, layer):
    model = choose(encoder, rows, label)
    assert model.config.encoder_specs[0].layer == layer
    (found,) = model.config.layer_choice["encoders"]
    assert [*found["errors"]] == ["1", "2", "3"]
    assert found["layer"] == (layer or DEPTH)
    again = choose(encoder, rows, label).config.layer_choice
    assert again["encoders"] == model.config.layer_choice["encoders"]


def test_few_units_that_were_held_out_together_claim_nothing(encoder, rows):
    groups = [str(i % 4) for i in range(180)], [str(4 + i % 2) for i in range(60)]
    model = choose(encoder, rows, "layer1", groups)
    assert model.config.encoder_specs[0].layer is None
    assert model.config.layer_choice["encoders"][0]["best"] == 1


def test_a_run_reads_the_chosen_layer_says_so_and_goes_on_and_predicts_with_it(encoder, rows, tmp_path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sequence", "y"])
        table.writerows(zip(rows["sequence"], rows["layer1"]))
    words = f"--dataset_name {tmp_path / 'rows.csv'} --sequence_columns sequence --label_column y --use_cpu true"
    words += f" --encoders {encoder} --head mlp --head_sizes 8 --num_train_epochs 2 --disable_tqdm true"
    words += f" --embedding_cache_dir {tmp_path / 'cache'} --without encoder_precision cpu_matmul"

    def run(name: str, more: str = "") -> tuple[dict, Path]:
        folder = tmp_path / name
        return TASK.main([*words.split(), "--output_dir", str(folder), *more.split()]), folder

    results, folder = run("run", "--layer auto")
    assert results["layer"]["encoders"][0]["layer"] == 1
    assert results["model"]["towers"][0]["layer"] == 1
    assert "Layer: 1 of 3 of esm: " in (folder / "run.log").read_text()
    assert "Layer: 1 of 3 of esm: " in (folder / "report.html").read_text()
    assert json.loads((folder / "config.json").read_text())["encoders"][0]["layer"] == 1
    with (folder / "predictions.csv").open() as file:
        written = [(row["sequence"], float(row["prediction"])) for row in csv.DictReader(file)]
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    predicted = predictor.predict([{"sequence": sequence} for sequence, _ in written])
    np.testing.assert_allclose(predicted, [prediction for _, prediction in written], atol=1e-4)
    again, _ = run("run", "--layer auto")
    assert again["layer"] == results["layer"]  # seconds too: what the run goes on from had chosen
    tuned, _ = run("tuned", f"--use_peft --lora_r 2 --init_head_from {folder}")
    assert tuned["model"]["towers"][0]["layer"] == 1
