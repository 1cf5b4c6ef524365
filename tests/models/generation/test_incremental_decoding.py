"""Writing antibodies: through a cache token by token, and with transformers' `generate`."""

import pytest
import torch
from tiny_generators import NAMES, make_batch, make_named, make_rows

from hf_ext.data.antibodies import AntibodyPair, decode_pair

BOUND = 2e-5  # float32, logits of about 1


@pytest.fixture(params=NAMES)
def model(request):
    return make_named(request.param)


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


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_a_transformers_decoder_knows_where_a_token_stands_without_distances():
    model, batch = make_named("transformer"), make_batch()
    with torch.no_grad():
        model.decoder.stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.zero_()
        same = torch.full((4, 6), 7)  # attention without distances tells equal tokens apart by their waves alone
        logits = model(**{**batch, "labels": None}, decoder_input_ids=same).logits
    assert (logits[:, 1:] - logits[:, :1]).abs().amax(2).min() > 1e-3


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


def test_decoding_through_the_cache_equals_decoding_all_token_by_token(model):
    batch = make_batch()
    ids = torch.randint(4, 24, (4, 75), generator=torch.Generator().manual_seed(1))  # over two chunks of `light`
    with torch.no_grad():
        whole = model(**{**batch, "labels": None}, decoder_input_ids=ids).logits
        assert (decode_step_by_step(model, batch, ids) - whole).abs().max() < BOUND
        broken = decode_step_by_step(model, batch, ids, forgets_at=40)
    assert (broken - whole)[:, :40].abs().max() < BOUND
    assert (broken - whole)[:, 40:].abs().amax((1, 2)).min() > 100 * BOUND


def test_a_cache_goes_on_after_several_tokens_at_once(model):
    batch = {**make_batch(), "labels": None}
    ids = torch.randint(4, 24, (4, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(**batch, decoder_input_ids=ids).logits
        first = model(**batch, decoder_input_ids=ids[:, :37], use_cache=True)
        rest = model(**batch, decoder_input_ids=ids[:, 37:], cache=first.cache, use_cache=True)
    assert (torch.cat([first.logits, rest.logits], dim=1) - whole).abs().max() < BOUND


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
