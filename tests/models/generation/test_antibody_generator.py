"""AntibodyGenerator, whatever its architecture: sizes, padding, affinity, loss, caches, linear attention, saving."""

import math

import pytest
import torch
from tiny_generators import NAMES, make_batch, make_generator, make_named, make_rows
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hf_ext.data import AntibodyPair, decode_pair
from hf_ext.errors import ArgumentError
from hf_ext.models import SIZES, AntibodyGenerator, GeneratorConfig
from hf_ext.models.generation.light import attend, attend_causally, feature_map, summarise

pytestmark = pytest.mark.internals


@pytest.fixture(params=NAMES)
def model(request):
    return make_named(request.param)


def count_parameters(architecture, size, part=("encoder.", "decoder.")):
    """Of the layers alone: without the embeddings of tokens and affinities, and without the LSTM's output."""
    with torch.device("meta"):
        model = AntibodyGenerator(GeneratorConfig.of_size(architecture, size))
    own = {name: p.numel() for name, p in model.named_parameters()}
    return sum(n for name, n in own.items() if name.startswith(part) and "embed_tokens" not in name)


# Of an encoder layer 4 d^2 + 2 d f, of a decoder layer 8 d^2 + 2 d f: tiny 917,504, small 5,505,024, full 44,040,192.
# The rest are norms, d each (2 and 3 a layer and one at the end), and relative positions, 32 a head in each stack.
@pytest.mark.parametrize(
    ("architecture", "numbers"),
    [
        ("transformer", (917_504 + 1_536 + 256, 5_505_024 + 4_352 + 256, 44_040_192 + 16_384 + 512)),
        ("lstm", (1_022_464, 4_076_544, 16_279_552)),
        ("light", (459_648, 1_836_800, 7_343_616)),
    ],
)
def test_architectures_have_the_sizes_of_the_specification(architecture, numbers):
    assert tuple(count_parameters(architecture, size) for size in SIZES[architecture]) == numbers


def pad_left(batch):
    width = batch["input_ids"].shape[1]
    lengths = batch["attention_mask"].sum(1).tolist()
    ids = torch.stack([row.roll(width - n) for row, n in zip(batch["input_ids"], lengths)])
    mask = torch.stack([row.roll(width - n) for row, n in zip(batch["attention_mask"], lengths)])
    return {**batch, "input_ids": ids, "attention_mask": mask}


def row_losses(model, batch):
    logits = model(**batch).logits.transpose(1, 2)
    losses = functional.cross_entropy(logits, batch["labels"], reduction="none")
    return losses.sum(1) / batch["labels"].ne(-100).sum(1)


@pytest.mark.parametrize("change", [dict, pad_left], ids=["right", "left"])
def test_a_row_has_the_same_loss_alone_and_in_a_padded_batch(model, change):
    rows = make_rows()
    alone = torch.stack([model(**make_batch([row])).loss for row in rows])
    batch = change(make_batch(rows))
    assert batch["attention_mask"].eq(0).any()
    assert (row_losses(model, batch) - alone).abs().max() < BOUND
    unmasked = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert (row_losses(model, unmasked) - alone)[1].abs() > 10 * BOUND  # a twin that sees the padding
    filled = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 9)}
    assert (row_losses(model, filled) - alone).abs().max() < BOUND  # whatever stands there


def test_the_lstm_runs_antigens_side_by_side_as_torch_runs_packed_ones():
    encoder = make_generator("lstm").encoder
    ids = torch.randint(4, 24, (5, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 3, 9, 1, 3])
    found = encoder(ids, (torch.arange(9) < lengths[:, None]).long())
    packed = pack_padded_sequence(encoder.embed_tokens(ids), lengths, batch_first=True, enforce_sorted=False)
    states, (hidden, cell) = encoder.lstm(packed)
    states, _ = pad_packed_sequence(states, batch_first=True)
    assert (found.last_hidden_state - states).abs().max() < BOUND
    assert found.memory.shape == (5, 2, 24, 2)
    for layer in range(2):  # of each, forwards and backwards
        for part, last in enumerate((hidden, cell)):
            assert (found.memory[:, layer, :12, part] - last[2 * layer]).abs().max() < BOUND
            assert (found.memory[:, layer, 12:, part] - last[2 * layer + 1]).abs().max() < BOUND
    assert (found.mean[1] - states[1, :3].mean(0)).abs().max() < BOUND
    padded, _ = encoder.lstm(encoder.embed_tokens(ids))
    assert (padded[1, :3] - states[1, :3]).abs().max() > 100 * BOUND  # a twin that runs over the padding


def test_no_token_sees_later_ones(model):
    batch = make_batch()
    ids = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    assert ids[0].tolist()[:3] == [1, 7, 21]  # <bos> E V
    assert ids[1].tolist()[4:7] == [2, 0, 0]  # what was -100
    before = model(**batch, decoder_input_ids=ids).logits
    ids[:, 5:] = 9
    after = model(**batch, decoder_input_ids=ids).logits
    assert (before - after)[:, :5].abs().max() < BOUND
    assert (before - after)[:, 5:].abs().max() > 0.01


def test_each_antigen_is_encoded_once_and_rows_see_their_own(model):
    batch = make_batch()
    seen = []
    model.encoder.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[0]))
    shared = model(**batch)
    index = batch.pop("antigen_index")
    each = {**batch, **{name: batch[name][index] for name in ("input_ids", "attention_mask")}}
    assert seen == [3]
    assert (model(**each).logits - shared.logits).abs().max() < BOUND
    assert seen == [3, 4]
    other = {**batch, "antigen_index": index.roll(1)}
    assert (model(**other).logits - shared.logits).abs().max() > 10 * BOUND  # the antigen is read


def test_a_batch_that_does_not_fit_together_is_refused():
    for change, words in (
        ({"antigen_index": None}, "3 antigens for 4 rows"),
        ({"antigen_index": torch.tensor([0, 1])}, "2 antigens for 4 rows"),
        ({"affinity": torch.tensor([7.0])}, r"affinity has shape \(1,\), there are 4 rows"),
        ({"input_ids": None}, "No antigen"),
        ({"labels": None}, "Nothing to write"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make_generator()(**{**make_batch(), **change})


def test_affinity_changes_what_is_written_and_unknown_is_one_thing(model):
    batch = make_batch()
    unknown = {**batch, "affinity": torch.full((4,), math.nan)}
    without = {name: value for name, value in batch.items() if name != "affinity"}
    assert torch.equal(model(**unknown).logits, model(**without).logits)
    difference = (model(**batch).logits - model(**unknown).logits).abs().amax((1, 2))
    assert difference[2] == 0  # the row whose affinity is unknown
    assert difference[[0, 1, 3]].min() > 0.01
    strong = {**batch, "affinity": batch["affinity"] + 1}
    assert (model(**strong).logits - model(**batch).logits).abs().amax((1, 2))[[0, 1, 3]].min() > 0.001


def test_affinity_is_standardised_by_the_configuration_and_hidden_in_training_only():
    batch = make_batch()
    given, scaled = make_generator(label_mean=8.0, label_std=2.0), make_generator(label_mean=0.0, label_std=1.0)
    assert torch.equal(given(**batch).logits, scaled(**{**batch, "affinity": (batch["affinity"] - 8) / 2}).logits)
    model, unknown = make_generator(unknown_affinity_dropout=1.0), {**batch, "affinity": None}
    assert not torch.equal(model(**batch).logits, model(**unknown).logits)
    model.train()
    assert torch.equal(model(**batch).logits, model(**unknown).logits)


def test_the_loss_is_the_mean_over_target_tokens_or_by_the_number_given(model):
    batch = make_batch()
    output = model(**batch)
    labels = batch["labels"]
    probabilities = output.logits.log_softmax(-1)
    picked = [probabilities[i, j, labels[i, j]] for i in range(4) for j in range(labels.shape[1]) if labels[i, j] >= 0]
    assert len(picked) == sum(map(len, (row["labels"] for row in make_rows())))
    assert output.loss.item() == pytest.approx(-sum(picked).item() / len(picked), rel=1e-5)
    assert model(**batch, num_items_in_batch=7).loss.item() == pytest.approx(-sum(picked).item() / 7, rel=1e-5)


def test_every_weight_gets_a_gradient_with_and_without_affinities(model):
    for affinity in (make_batch()["affinity"], None):
        model.train().zero_grad()
        model(**{**make_batch(), "affinity": affinity}).loss.backward()
        assert [key for key, p in model.named_parameters() if p.grad is None] == []


def test_what_was_saved_writes_the_same(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    again, info = AntibodyGenerator.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (again.config.architecture, again.config.label_mean) == (model.config.architecture, 8.0)
    given = {**make_batch(), "max_new_tokens": 9}
    assert torch.equal(again(**make_batch()).logits, model(**make_batch()).logits)
    assert torch.equal(again.generate(**given), model.generate(**given))


def test_configurations_of_which_nothing_can_be_built_are_refused():
    for settings, words in (
        ({"architecture": "rnn"}, "architecture='rnn': allowed are lstm, transformer, light, esm"),
        ({"d_model": 18, "num_heads": 4}, "d_model=18 with num_heads=4"),
        ({"architecture": "light", "d_model": 9, "num_heads": 3}, "d_model=9: must be even"),
        ({"architecture": "lstm", "num_encoder_layers": 3}, "num_encoder_layers=3 with num_decoder_layers=2"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        ({"label_std": 0.0}, "label_std=0.0"),
        ({"unknown_affinity_dropout": 1.5}, "unknown_affinity_dropout=1.5: must be from 0 to 1"),
        ({"architecture": "esm"}, "antigen_encoder missing"),
        ({"antigen_encoder": {}}, "antigen_encoder given"),
    ):
        with pytest.raises(ArgumentError, match=words):
            GeneratorConfig(**settings)
    with pytest.raises(ArgumentError, match="size='huge': allowed are tiny, small, full"):
        GeneratorConfig.of_size("lstm", "huge")


BOUND = 2e-5  # float32, logits of about 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_pairs_by_heart_and_tells_antigens_apart(name):
    rows, model = make_rows()[:2], make_named(name, hidden_size=24)
    batch = make_batch(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    written = [decode_pair(row) for row in model.generate(**batch, max_new_tokens=20).tolist()]
    assert written == [AntibodyPair("EVQLVESGG", "DIQMT"), AntibodyPair("QVQ")]


def decode_step_by_step(model, batch, ids, forgets_at=None):
    """Logits of each token, fed one at a time through the cache; it is lost before one of them if asked to."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "antigen_index", "affinity")}
    past, found = None, []
    for i in range(ids.shape[1]):
        past = None if i == forgets_at else past
        output = model(**given, decoder_input_ids=ids[:, i : i + 1], cache=past, use_cache=True)
        past = output.cache
        found.append(output.logits)
        assert past.get_seq_length() == i + 1 - (forgets_at or 0) * (i >= (forgets_at or 99))
    return torch.cat(found, dim=1)


@pytest.mark.sampled(2)
def test_decoding_through_the_cache_equals_decoding_all_at_once(model):
    batch = make_batch()
    ids = torch.randint(4, 24, (4, 75), generator=torch.Generator().manual_seed(1))  # over two chunks of `light`
    with torch.no_grad():
        whole = model(**{**batch, "labels": None}, decoder_input_ids=ids).logits
        assert (decode_step_by_step(model, batch, ids) - whole).abs().max() < BOUND
        broken = decode_step_by_step(model, batch, ids, forgets_at=40)
    assert (broken - whole)[:, :40].abs().max() < BOUND
    assert (broken - whole)[:, 40:].abs().amax((1, 2)).min() > 100 * BOUND


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 4}, {"do_sample": True, "top_k": 5}, {"do_sample": True, "top_p": 0.8, "temperature": 1.5}],
    ids=["greedy", "beams", "top-k", "top-p"],
)
def test_generate_writes_the_same_with_and_without_cache(model, how):
    batch = make_batch()
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        written.append(model.generate(**batch, **how, use_cache=use_cache, max_new_tokens=25))
    assert torch.equal(*written)
    assert written[0].shape[0] == 4
    assert written[0][:, 0].tolist() == [1] * 4


def test_linear_attention_is_every_pair_of_tokens_weight_by_weight():
    """Over two chunks and a part of one; masked tokens are as if they were not there."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 3, 75, 4, generator=generator, dtype=torch.float64)
    weights = feature_map(queries) @ feature_map(keys).transpose(2, 3)

    def written_out(allowed):
        return (weights * allowed / (weights * allowed).sum(-1, keepdim=True)) @ values

    causal = torch.ones(75, 75, dtype=torch.float64).tril()
    seen, summary = attend_causally(queries, keys, values)
    assert (seen - written_out(causal)).abs().max() < 1e-12
    assert (seen - written_out(causal.tril(-1) + torch.eye(75).flip(0))).abs().max() > 0.01
    assert (summary - summarise(keys, values, None)).abs().max() < 1e-12
    mask = (torch.arange(75) < 50).expand(2, 75)
    assert (attend(queries, summarise(keys, values, mask)) - written_out(mask[:, None, None])).abs().max() < 1e-12
    assert attend(queries, summarise(keys, values, mask * 0)).eq(0).all()
