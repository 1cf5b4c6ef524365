"""One ONNX file of encoders and head: its predictions are the model's, and a file that differs is not kept."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from inside import build_affinity_model

from hf_ext.data import DataArguments, SequenceCollator, SequenceFeatures, Variants
from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.finished import export
from hf_ext.labels import make_kind
from hf_ext.models import HeadEnsemble
from hf_ext.optional import import_problem
from hf_ext.property import AffinityArguments, AffinityPredictor, build_collator

pytestmark = pytest.mark.internals
DOCS = Path(__file__).resolve().parents[2] / "docs" / "library.md"
COLUMNS = ["heavy", "light", "antigen"]
ROWS = {"heavy": ["EVQLVES", "QVQLQ", "EVQ"], "light": ["DIQMTQS", "EI", "DC"], "antigen": ["NITNLCP", "M", "KVFGRCE"]}


def save(folder, encoders, columns=COLUMNS, kind=None, missing=(), prepare=None, **given):
    """A folder of a model with a random head, and adapters that change what they stand beside."""
    torch.manual_seed(0)
    model = build_affinity_model(AffinityArguments(encoders=encoders, head_dropout=0.0, **given), columns, kind=kind)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.config.is_scaled = True
    if prepare is not None:
        prepare(model)
    model.save_pretrained(folder)
    args = DataArguments(sequence_columns=columns, missing_chains=[*missing])
    build_collator(model, args).save_pretrained(folder)
    return str(folder)


def run_script(path, rows):
    """What the script in the docs predicts, which knows numpy and onnxruntime alone."""
    (code,) = re.findall(r"```python\n(import json\n.*?)```", DOCS.read_text(), re.DOTALL)
    code = re.sub(r"rows = \{.*?\}\n", "", code.replace('"model.onnx"', repr(str(path))), flags=re.DOTALL)
    found = {"rows": rows}
    exec(code, found)
    return found["predictions"]


def test_without_its_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"onnx is needed for hf-ext export.*hf_ext\[onnx\]"):
        export.main(["--model", "nowhere"])
    monkeypatch.undo()
    import_problem.cache_clear()


def test_encoders_in_bits_are_refused(tmp_path, demo_encoders, monkeypatch):
    monkeypatch.setattr(export, "require", lambda *words: None)
    folder = Path(save(tmp_path / "model", [demo_encoders[1]], ["sequence"]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "encoder_bits": 8}))
    with pytest.raises(ArgumentError, match="encoders in 8 bits cannot be exported"):
        export.main(["--model", str(folder), "--output", str(tmp_path / "a.onnx")])


def save_reader(folder, encoders, columns, rows, wild_type="", **given):
    """A folder of a model whose head reads residues of `rows` alone."""
    variants = Variants.fit(rows, columns[0], wild_type) if wild_type else Variants()
    counts = SequenceFeatures.fit(Dataset.from_list(rows), columns, 40)
    sources = {**({"variants": variants} if wild_type else {}), "counts": counts}
    num_counts = counts.num_features

    def mix(model):
        made = HeadEnsemble(
            [*model.embedding_sizes.values()],
            [2] * len(model.embedding_sizes),
            [],
            num_residues=len(variants) + num_counts,
            num_counts=num_counts,
        )
        for view, weight in (("residues", 0.7), ("counts", 0.3)):
            made.add(view, weight, made.make_stack(view, 1, []))
        model.set_ensemble(made)

    save(folder, encoders, columns, prepare=mix, **given)
    collator = SequenceCollator.from_pretrained(folder)
    collator.residues = sources
    collator.save_pretrained(folder)
    return str(folder)


READ = {
    "of variants": (["sequence"], [{"sequence": one} for one in ("MKTAYI", "MKTAYW", "MKSAYW", "ACTAYI", "ACSAYI")]),
    "of a pair": (["heavy", "light"], [{"heavy": "EVQLVES", "light": "DIQMT"}, {"heavy": "QVQLQ", "light": "DIVLTQ"}]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", READ)
def test_what_heads_read_off_sequences_is_computed_in_the_file(what, tmp_path, demo_encoders):
    pytest.importorskip("onnxruntime")
    columns, rows = READ[what]
    given = {"wild_type": "MKTAYI"} if len(columns) == 1 else {"tower_inputs": ["heavy+light"]}
    folder = save_reader(tmp_path / "model", [demo_encoders[1]], columns, rows, **given)
    path = export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])
    asked = [*rows, {name: text[::-1] for name, text in rows[0].items()}, dict.fromkeys(columns, "MKTAYIA")]
    asked = {name: [row[name] for row in asked] for name in columns}
    expected = AffinityPredictor.from_pretrained(folder).predict(asked)
    assert len({*np.round(expected, 4).tolist()}) >= len(rows)
    assert np.allclose(run_script(path, asked), expected, atol=1e-5)


def test_of_a_pair_that_may_lack_a_chain_heads_that_read_residues_are_refused(tmp_path, demo_encoders, monkeypatch):
    monkeypatch.setattr(export, "require", lambda *words: None)
    columns, rows = READ["of a pair"]
    folder = save_reader(
        tmp_path / "model", [demo_encoders[1]], columns, rows, tower_inputs=["heavy+light"], missing=["light"]
    )
    with pytest.raises(ArgumentError, match=r"of a pair one chain may be missing: .* --head mlp"):
        export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])


@pytest.mark.nightly
def test_pairs_that_lack_chains_and_adapters_are_in_one_file(tmp_path, demo_encoders):
    pytest.importorskip("onnxruntime")
    given = {"tower_inputs": ["heavy+light", "antigen"], "tower_training": ["frozen", "lora"], "missing": ["light"]}
    folder = save(tmp_path / "model", [*demo_encoders], **given)
    rows = {**ROWS, "light": ["DIQMTQS", "EI", ""]}
    path = export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])
    assert {one.name for one in tmp_path.iterdir()} == {"model", "a.onnx"}
    expected = AffinityPredictor.from_pretrained(folder).predict(rows)
    assert np.ptp(expected) > 1e-2
    assert np.allclose(run_script(path, rows), expected, atol=1e-4)
    swapped = {**rows, "antigen": rows["antigen"][::-1]}
    assert not np.allclose(run_script(path, swapped), expected, atol=1e-4)
    with pytest.raises(ArgumentError, match="is there already"):
        export.main(["--model", folder, "--output", str(path)])


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["classification", "residue_classification", "multilabel"])
def test_classes_have_probabilities_and_residues_have_them_each(task, tmp_path, demo_encoders):
    pytest.importorskip("onnxruntime")
    folder = save(tmp_path / task, [demo_encoders[1]], ["sequence"], make_kind(task, ["label"], ["a", "b", "c"]))
    path = export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])
    rows = {"sequence": ["MKTAY", "AC"]}
    found = run_script(path, rows)
    expected = AffinityPredictor.from_pretrained(folder).predict_proba(rows)
    if task == "residue_classification":  # behind the first token, which stands for the sequence
        found = [found[0, 1:6], found[1, 1:3]]
    assert all(np.allclose(*pair, atol=1e-4) for pair in zip(found, expected, strict=True))


@pytest.mark.nightly
def test_an_ensemble_is_in_the_file(tmp_path, demo_encoders):
    pytest.importorskip("onnxruntime")

    def mix(model):
        ensemble = HeadEnsemble([*model.embedding_sizes.values()], [2, 3, 4], [])
        for i in range(3):
            torch.nn.init.normal_(getattr(ensemble, f"basis_{i}"))
        for view, weight, sizes, form in (("features", 0.4, [4], "mlp"), ("directions", 0.6, [5], "product")):
            ensemble.add(view, weight, ensemble.make_stack(view, 2, sizes, form))
        model.set_ensemble(ensemble)

    folder = save(tmp_path / "model", [*demo_encoders], prepare=mix, tower_inputs=["heavy,light", "antigen"])
    path = export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])
    expected = AffinityPredictor.from_pretrained(folder).predict(ROWS)
    assert np.ptp(expected) > 1e-2
    assert np.allclose(run_script(path, ROWS), expected, atol=1e-4)


@pytest.mark.nightly
def test_a_file_that_predicts_something_else_is_not_kept(tmp_path, demo_encoders, monkeypatch):
    pytest.importorskip("onnxruntime")
    folder = save(tmp_path / "model", [demo_encoders[1]], ["sequence"])
    is_among = export._is_among
    monkeypatch.setattr(export, "_is_among", lambda ids, values: is_among(ids, values) & False)  # special tokens count
    with pytest.raises(ArgumentError, match=r"predicts something else, .* times further .* no file was written"):
        export.main(["--model", folder, "--output", str(tmp_path / "a.onnx")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
