"""From arguments to an affinity model: which tower reads what, lengths, encoders, and what is refused before work."""

import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from inside import build_affinity_model
from safetensors.torch import load_file, save_file
from tiny_affinity import ROWS
from tiny_t5 import write_t5_encoder
from transformers import RobertaConfig

from hf_ext.data import DataArguments, check_inputs
from hf_ext.data.batches.input_checks import STREAM_CHECK_ROWS
from hf_ext.errors import ArgumentError, DataError
from hf_ext.models import EncoderSpec, LoraSettings, TowerSpec, build_config, load_encoder, read_encoder
from hf_ext.models.encoders import fingerprint_weights
from hf_ext.property import AffinityArguments, build_collator, check_splits
from hf_ext.property.building import tower_inputs

pytestmark = pytest.mark.internals
THREE = ["heavy", "light", "antigen"]


@pytest.mark.parametrize(
    ("num_encoders", "given", "columns", "inputs"),
    [
        (1, [], ["sequence"], [[["sequence"]]]),
        (1, [], THREE, [[["heavy"], ["light"], ["antigen"]]]),
        (3, [], THREE, [[["heavy"]], [["light"]], [["antigen"]]]),
        (2, ["heavy,light", "antigen"], THREE, [[["heavy"], ["light"]], [["antigen"]]]),
        (2, ["heavy+light", "antigen"], THREE, [[["heavy", "light"]], [["antigen"]]]),
        (1, ["heavy+light,antigen"], THREE, [[["heavy", "light"], ["antigen"]]]),
    ],
)
def test_towers_read_the_columns_worked_out_by_hand(num_encoders, given, columns, inputs):
    args = AffinityArguments(encoders=["e"] * num_encoders, tower_inputs=given)
    assert tower_inputs(args, columns) == inputs


def test_an_unclear_or_incomplete_assignment_is_refused():
    for num_encoders, given, message in (
        (2, [], "2 encoders for 3 sequence columns: say which reads which, for example --tower_inputs heavy light,ant"),
        (2, ["heavy"], "--tower_inputs has 1 entries for 2 encoders"),
        (2, ["heavy", "light"], "read ['heavy', 'light']; the sequence columns are ['heavy', 'light', 'antigen']"),
        (2, ["heavy,light", "light+antigen"], "each exactly once"),
        (1, ["heavy,light,antigen,pKd"], "each exactly once"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            tower_inputs(AffinityArguments(encoders=["e"] * num_encoders, tower_inputs=given), THREE)


def test_a_model_is_built_as_its_arguments_say(demo_encoders):
    bert, esm = demo_encoders
    args = AffinityArguments(
        encoders=[bert, esm],
        tower_inputs=["heavy+light", "antigen"],
        tower_training=["lora", "frozen"],
        pooling=["cls", "max"],
        head_sizes=[4],
        loss="huber",
    )
    config = build_affinity_model(args, THREE, LoraSettings(r=2, kwargs={"use_rslora": True})).config
    assert [(spec.training, spec.lora.get("r")) for spec in config.encoder_specs] == [("lora", 2), ("frozen", None)]
    assert [tower.pooling for tower in config.tower_specs] == ["cls", "max"]
    assert config.encoder_specs[0].lora["kwargs"] == {"use_rslora": True}
    assert (config.head_sizes, config.loss) == ([4], "huber")


@pytest.mark.parametrize(("training", "num_weights"), [(["frozen"], 1), (["full", "frozen"], 2)])
def test_towers_share_weights_if_they_name_the_same_encoder_and_train_alike(demo_encoders, training, num_weights):
    args = AffinityArguments(encoders=[demo_encoders[1]] * 2, tower_training=training, head_sizes=[4])
    config = build_affinity_model(args, THREE[:2]).config
    assert len(config.encoder_specs) == num_weights
    assert [tower.encoder for tower in config.tower_specs] == [0, num_weights - 1]


def test_arguments_that_make_no_model_are_refused(demo_encoders, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    RobertaConfig(vocab_size=32, **sizes).save_pretrained(tmp_path)
    for settings, message in (
        ({"encoders": []}, "No encoder: give --encoders, for example facebook/esm2_t12_35M_UR50D"),
        ({"tower_training": ["half"]}, "--tower_training ['half']: allowed are frozen, lora, full"),
        ({"tower_training": ["frozen", "full"]}, "--tower_training has 2 values for 1 encoders: give 1 or as many"),
        ({"encoder_revisions": ["a", "b"]}, "--encoder_revisions has 2 values for 1 encoders"),
        ({"pooling": ["median"]}, "pooling='median': allowed are mean, mean_tokens, cls, max"),
        ({"loss": "mae"}, "loss='mae': allowed are mse, huber, tobit, ranking"),
        ({"encoders": ["/nowhere/esm"]}, "Encoder '/nowhere/esm': there is no such folder"),
        ({"encoders": [str(tmp_path.parent)]}, "no model configuration found"),
        ({"encoders": [str(tmp_path)]}, "Take ESM C (biohub/ESMC-300M), or"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            build_affinity_model(AffinityArguments(**{"encoders": [demo_encoders[1]], **settings}), ["heavy"])


def test_the_first_token_of_a_t5_tower_is_no_pooling(demo_encoders, tmp_path):
    encoders = [write_t5_encoder(tmp_path), demo_encoders[1]]
    with pytest.raises(ArgumentError, match=r"type 't5' does not stand for the sequence.*mean_tokens"):
        build_affinity_model(AffinityArguments(encoders=encoders, pooling=["cls"]), THREE[:2])
    model = build_affinity_model(AffinityArguments(encoders=encoders, pooling=["mean_tokens", "cls"]), THREE[:2])
    assert [tower.pooling for tower in model.config.tower_specs] == ["mean_tokens", "cls"]


def collator_of(encoders, inputs, columns=THREE, max_length=None, **data_arguments):
    args = AffinityArguments(encoders=encoders, tower_inputs=inputs, head_sizes=[4])
    return build_collator(build_affinity_model(args, columns), DataArguments(**data_arguments), max_length)


def test_length_limits_are_those_of_positions_or_tokenizer_and_count_special_tokens(demo_encoders, tmp_path):
    def limits(*given, **settings):
        return [tokenizer.max_residues for tokenizer in collator_of(*given, **settings).tokenizers.values()]

    bert, esm = demo_encoders  # 512 learned positions; rotary, and a tokenizer for 1024 tokens
    t5, pair = write_t5_encoder(tmp_path), ["heavy+light", "antigen"]
    assert limits([bert, esm, t5], []) == [510, 1022, None]
    assert limits([bert, esm], pair) == [509, 1022]
    assert limits([bert, esm, t5], [], max_length=512) == [510, 510, 511]
    assert limits([t5, esm], pair, max_length=512, max_residues=400, too_long="truncate") == [400, 400]
    assert limits([t5, bert], pair, max_length=1000) == [998, 510]
    with pytest.raises(ArgumentError, match="max_length=2: 2 tokens are special ones, so nothing is left for residues"):
        collator_of([bert], [], ["heavy"], max_length=2)


def splits(*antigens):
    return {"train": Dataset.from_list([{**ROWS[0], "antigen": antigen} for antigen in antigens])}


def test_rows_above_the_limit_are_refused_before_anything_is_computed(demo_encoders):
    pair = ["heavy+light", "antigen"]
    collator = collator_of(demo_encoders, pair)
    collator.too_long = "error"
    with pytest.raises(DataError, match=r"Input 'antigen' has 1030 residues; its encoder takes 1022. Use --too_long"):
        check_inputs(collator, splits("A" * 1025, "A" * 1030, "A"))


def test_unknown_residues_are_refused_in_every_split(demo_encoders, tmp_path):
    shutil.copytree(demo_encoders[0], tmp_path / "bert")
    without_x = (Path(demo_encoders[0]) / "vocab.txt").read_text().replace("\nX\n", "\n")
    (tmp_path / "bert" / "vocab.txt").write_text(without_x)
    (tmp_path / "bert" / "tokenizer.json").unlink()
    collator = collator_of([str(tmp_path / "bert")], [], ["antigen"])
    report = check_inputs(collator, {**splits("A" * 199, "X"), "test": splits("C")["train"]})
    assert report["antigen"]["unknown_share"] == 1 / 201
    with pytest.raises(DataError, match=r"Column 'antigen': 50.0% of the residues become the unknown token"):
        check_inputs(collator, {**splits("A" * 10), "test": splits("X" * 10)["train"]})


def test_a_stream_is_checked_on_its_first_rows_only(demo_encoders):
    drawn = []

    def rows():
        for i in range(3 * STREAM_CHECK_ROWS):
            drawn.append(i)
            yield {**ROWS[0], "antigen": "A" * (1 + i % 5)}

    collator = collator_of(demo_encoders, ["heavy+light", "antigen"])
    report = check_inputs(collator, {"train": IterableDataset.from_generator(rows)})
    assert report["antigen"]["longest"] == 5
    assert STREAM_CHECK_ROWS <= max(drawn) + 1 <= STREAM_CHECK_ROWS + 1


def test_a_missing_split_is_refused_before_training_and_named():
    check_splits({"train": [1], "validation": [2], "test": [3]})
    with pytest.raises(ArgumentError, match=r"no validation and no test split.*--split_sizes"):
        check_splits({"train": [1]})


ENCODER = EncoderSpec("folder", {"model_type": "esm", "hidden_size": 8})


def towers(*inputs):
    return [TowerSpec(0, columns, "mean") for columns in inputs]


def test_towers_that_no_model_could_be_built_from_are_refused():
    for specs, message in (
        ([], "0 towers: an affinity model has one to 3"),
        (towers(*[[[name]] for name in "abcd"]), "4 towers: an affinity model has one to 3"),
        (towers([["a"]], [["a", "b"]]), "['a', 'a+b'] repeat a column"),
        (towers([["a", "b", "c"]]), "an input is one column or a pair such as heavy+light"),
        (towers([[]]), "an input is one column or a pair such as heavy+light"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            build_config([ENCODER], specs)


def test_missing_weights_are_refused_unless_no_embedding_needs_them(demo_encoders, tmp_path):
    folder = tmp_path / "esm"
    shutil.copytree(demo_encoders[1], folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "contact_head" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    load_encoder(read_encoder(str(folder), None, "frozen", LoraSettings()))
    kept.pop(next(name for name in kept if "query.weight" in name))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=r"lacks weights: .*query\.weight.*1 in all"):
        load_encoder(read_encoder(str(folder), None, "frozen", LoraSettings()))


def test_fingerprints_follow_weights_and_configuration_and_not_other_files(demo_encoders, tmp_path):
    assert fingerprint_weights("facebook/esm2_t6_8M_UR50D", "c731040f") == "commit:c731040f"
    folder = tmp_path / "bert"
    shutil.copytree(demo_encoders[0], folder)
    assert fingerprint_weights(str(folder), None) == fingerprint_weights(demo_encoders[0], None)
    (folder / "README.md").write_text("more")
    assert fingerprint_weights(str(folder), None) == fingerprint_weights(demo_encoders[0], None)
    with (Path(folder) / "config.json").open("a") as file:
        file.write("\n")
    assert fingerprint_weights(str(folder), None) != fingerprint_weights(demo_encoders[0], None)
