"""A generator on a pretrained ESM: frozen by reference, with adapters, in full."""

import pytest
import torch
from tiny_generators import TINY, make_batch, make_rows
from transformers import EsmModel, EsmTokenizer

from hf_ext.errors import ArgumentError
from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings, has_adapters, merged_copy


@pytest.fixture
def esm(demo_encoders):
    return demo_encoders[1]


@pytest.fixture
def tokenizer(esm):
    return EsmTokenizer.from_pretrained(esm)


@pytest.fixture
def batch(tokenizer):
    return make_batch(make_rows(tokenizer))


BOUND = 2e-5


def make_on(esm, training="frozen", **settings):
    torch.manual_seed(0)
    spec = read_encoder(esm, None, training, LoraSettings(r=2))
    given = {**TINY, "dropout": 0.0, "label_mean": 8.0, **settings}
    return AntibodyGenerator.from_encoder(spec, "tiny", **given)


def train(model, batch, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        model(**batch).loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_a_frozen_encoder_is_used_but_is_no_part_of_the_model_unless_asked_for(demo_encoders, esm, batch, tmp_path):
    model = make_on(esm)
    assert not [name for name, _ in model.named_parameters() if name.startswith("encoder")]
    train(model, batch)
    states = EsmModel.from_pretrained(esm, add_pooling_layer=False).eval()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    )
    assert torch.equal(model.encode(batch["input_ids"], batch["attention_mask"])[0], states.last_hidden_state)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 300_000  # without ESM's 66,000 weights: 250 kB
    again = AntibodyGenerator.from_pretrained(tmp_path)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert torch.equal(again.generate(**batch, max_new_tokens=8), model.generate(**batch, max_new_tokens=8))
    model = make_on(esm, save_full=True).train()
    assert not model.encoder.model.training
    model.eval().save_pretrained(tmp_path / "full")
    again = AntibodyGenerator.from_pretrained(tmp_path / "full")
    again.encoder.spec.name_or_path = "gone"
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert not any(p.requires_grad for name, p in again.named_parameters() if name.startswith("encoder"))
    with pytest.raises(ArgumentError, match="is of type 'bert'; allowed are esm and esmc"):
        make_on(demo_encoders[0])


def test_given_states_give_the_same_and_the_encoder_is_never_loaded(esm, batch, tokenizer, tmp_path):
    model = make_on(esm).eval()
    live, written = model(**batch), model.generate(**batch, num_beams=2, max_new_tokens=9)
    states, mask = model.encode(batch.pop("input_ids"), batch["attention_mask"])[0], batch["attention_mask"]
    states = states * mask[:, :, None]  # what stands at padding says nothing
    model.encoder.release()
    model.encoder.spec.name_or_path = str(tmp_path / "gone")
    given = {**batch, "encoder_outputs": (states,)}
    assert (model(**given).logits - live.logits).abs().max() < BOUND
    assert torch.equal(model.generate(**given, num_beams=2, max_new_tokens=9), written)
    with pytest.raises(ArgumentError, match=r"gone' (has changed|cannot be loaded)"):
        model(**{**batch, "input_ids": torch.ones_like(mask)})


@pytest.mark.parametrize("training", ["lora", "full"])
def test_an_encoder_that_trains_is_saved_and_goes_on_training(esm, batch, tmp_path, training):
    model = make_on(esm, training)
    published = make_on(esm).encode(batch["input_ids"], batch["attention_mask"])[0]
    found = model.eval().encode(batch["input_ids"], batch["attention_mask"])[0]
    assert torch.allclose(found, published, atol=BOUND)  # adapters begin as nothing
    train(model, batch)
    changed = model.encode(batch["input_ids"], batch["attention_mask"])[0]
    assert not torch.allclose(changed, published, atol=100 * BOUND)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    again, info = AntibodyGenerator.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    trains = [{name for name, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert trains[0] == trains[1]
    inside = {name for name in trains[0] if name.startswith("encoder")}
    assert inside
    assert all("lora_" in name for name in inside) == (training == "lora")


def test_adapters_can_be_merged(esm, batch):
    model = train(make_on(esm, "lora"), batch)
    merged = merged_copy(model)
    assert has_adapters(model)
    assert not has_adapters(merged)
    assert merged.config.antigen_encoder["training"] == "full"
    assert (merged(**batch).logits - model(**batch).logits).abs().max() < BOUND
    with pytest.raises(ArgumentError, match="no adapters"):
        merged.merge_adapters()
