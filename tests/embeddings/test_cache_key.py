"""What a cached embedding is known by: the encoder's commit, what products are computed in, the library's version."""

import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hf_ext.errors import ArgumentError
from hf_ext.models import POOLINGS, LoraSettings, load_encoder, read_encoder
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NAME = "me/encoder"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def repository(demo_encoders):
    """A Hub encoder in the local cache with two commits of other weights; `main` names the first until it is moved."""
    folder = Path(constants.HF_HUB_CACHE) / "models--me--encoder"
    for scale, commit in enumerate((FIRST, SECOND), 1):
        snapshot = folder / "snapshots" / commit
        shutil.copytree(demo_encoders[1], snapshot)
        tensors = load_file(snapshot / "model.safetensors")
        changed = {k: v * scale if "word_embeddings" in k else v for k, v in tensors.items()}
        save_file(changed, snapshot / "model.safetensors", metadata={"format": "pt"})

    def move(commit: str) -> None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)

    move(FIRST)
    yield move
    shutil.rmtree(folder)


@pytest.fixture
def make_trainer(repository, make_affinity, demo_rows, tmp_path):
    def make(pooling="mean") -> FastTrainer:
        one = {"encoders": [NAME], "encoder_revisions": ["main"], "tower_inputs": ["heavy,light,antigen"]}
        model, collator = make_affinity(**one, tower_training=["frozen"], pooling=[pooling])
        cached = {"speedups": ["embedding_cache"], "embedding_cache_dir": str(tmp_path / "cache")}
        args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **cached)
        return FastTrainer(model, args, collator, demo_rows)

    return make


def encode(trainer, rows, num_encoded: int) -> torch.Tensor:
    found = trainer.encode_distinct("heavy", rows["heavy"][:1])
    assert trainer.plan["embedding_cache"].evidence["num_encoded"] == num_encoded
    return found


def test_a_branch_that_moved_gives_no_stale_embeddings(repository, make_trainer, demo_rows):
    found = []
    for commit, num_encoded in ((FIRST, 1), (SECOND, 1), (FIRST, 0)):
        repository(commit)
        trainer = make_trainer()
        assert trainer.embedding_key("heavy")["encoder"] == f"{NAME}@{commit}"
        found.append(encode(trainer, demo_rows, num_encoded))
    assert (found[0] - found[1]).abs().max() > 0.01
    assert torch.equal(found[0], found[2])


def test_embeddings_of_one_pooling_are_never_those_of_another(make_trainer, demo_rows):
    first, again = ({pooling: encode(make_trainer(pooling), demo_rows, num) for pooling in POOLINGS} for num in (1, 0))
    assert min((a - b).abs().max() for a, b in combinations(first.values(), 2)) > 0.01
    assert all(torch.equal(first[pooling], again[pooling]) for pooling in POOLINGS)


def test_weights_are_those_of_the_commit_the_model_was_made_with(repository):
    spec = read_encoder(NAME, "main", "frozen", LoraSettings())
    assert (spec.revision, spec.fingerprint) == ("main", f"commit:{FIRST}")
    before = load_encoder(spec).get_input_embeddings().weight
    repository(SECOND)
    assert torch.equal(load_encoder(spec).get_input_embeddings().weight, before)
    moved = load_encoder(read_encoder(NAME, "main", "frozen", LoraSettings())).get_input_embeddings().weight
    assert torch.equal(moved, 2 * before)
    spec.fingerprint = "commit:" + "c" * 40
    with pytest.raises(ArgumentError, match="cannot be loaded"):
        load_encoder(spec)
