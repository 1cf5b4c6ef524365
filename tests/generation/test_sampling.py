"""What is drawn depends on seed, antigen and number alone; what is written is scored by the model as it is."""

import math
import random

import numpy as np
import pytest
import torch
from inside import sample_pairs
from tiny_generators import NAMES, make_generator, make_named

from hf_ext.data import VOCABULARY, PairEncoder
from hf_ext.errors import ArgumentError, DataError
from hf_ext.generation.sampling import gumbel_noise

pytestmark = pytest.mark.internals
ANTIGENS = ["MKTAYIAKQRQISFVKSH", "ACD", "GGSWLLP"]
LONG = {"max_new_tokens": 60, "show_progress": False}
SHORT = {"max_new_tokens": 14, "show_progress": False}


def draw(model, antigens=ANTIGENS, **settings):
    """(heavy, light, malformed) of each sample of each antigen."""
    found = sample_pairs(model, None, antigens, **{**SHORT, **settings})
    return [[(one.pair.heavy, one.pair.light, one.pair.malformed) for one in each] for each in found]


@pytest.fixture(params=NAMES)
def model(request):
    return make_named(request.param)


@pytest.mark.sampled(6)
def test_sequences_do_not_depend_on_batches(model):
    together = draw(model, num_samples=6)
    assert draw(model, num_samples=6, max_tokens_per_batch=1) == together  # each alone
    assert draw(model, num_samples=6, max_tokens_per_batch=100) == together
    assert [len(each) for each in together] == [6, 6, 6]
    assert len({one for each in together for one in each}) > 15
    assert draw(model, num_samples=6, seed=1) != together


def test_sequences_do_not_depend_on_other_antigens_or_on_how_many_samples_there_are():
    model = make_generator()
    first = draw(model, num_samples=4)
    assert draw(model, ANTIGENS[::-1], num_samples=4) == first[::-1]
    assert draw(model, [ANTIGENS[1]], num_samples=2)[0] == first[1][:2]
    assert draw(model, [ANTIGENS[1]] * 4) == [[one] for one in first[1]]  # a second request goes on


@pytest.mark.sampled(2)
def test_each_distinct_antigen_is_encoded_once_however_many_batches_there_are(model):
    seen = []
    model.encoder.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    draw(model, [*ANTIGENS, "ACD"], num_samples=5, max_tokens_per_batch=120)
    assert sum(seen) == 3


def test_draws_have_the_models_probabilities():
    model = make_generator()
    encoded = PairEncoder().encode_antigens(["ACD"])[0]
    logits = model(torch.as_tensor(encoded)[None], decoder_input_ids=torch.tensor([[1]])).logits[0, 0].double()
    drawn = sample_pairs(model, None, ["ACD"], **{**SHORT, "num_samples": 2000, "max_new_tokens": 1})[0]
    # A single token: its probability is the whole score, and tells which token it was.
    counts = np.zeros(len(VOCABULARY))
    of_all = logits.detach().softmax(0).numpy()
    for one in drawn:
        counts[np.abs(of_all - math.exp(one.log_probability)).argmin()] += 1
    assert not counts[[0, 1, 24]].any()  # <pad>, <bos> and X
    counts, allowed = counts[2:24], logits.detach()[2:24]
    expected = allowed.softmax(0).numpy()
    statistic = ((counts - 2000 * expected) ** 2 / (2000 * expected)).sum()
    assert statistic < 46.8  # chi-squared with 21 degrees of freedom passes that once in 1,000
    flat = (allowed / 2).softmax(0).numpy()
    assert ((counts - 2000 * flat) ** 2 / (2000 * flat)).sum() > 46.8  # another temperature would be noticed


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}])
def test_what_no_antibody_has_inside_is_never_written(settings):
    model = make_generator("lstm")
    with torch.no_grad():
        model.output.bias[[0, 1, 24]] += 20.0  # <pad>, <bos> and X, by far the likeliest
    for each in draw(model, **settings, num_samples=1):
        assert not any("inside" in problem for _, _, problems in each for problem in problems)
        assert not any("X" in heavy + (light or "") for heavy, light, _ in each)
    batch = PairEncoder().tokenizer(ANTIGENS[:1], return_tensors="pt")
    plain = model.generate(**batch, do_sample=True, max_new_tokens=20, min_new_tokens=20)
    assert plain.shape == (1, 21)
    assert not {0, 1, 24} & set(plain[0, 1:].tolist())


def test_noise_is_written_down():
    """The same on every machine and with every NumPy: a change here changes what seeds mean."""
    noise = gumbel_noise(0, "ACD", 0, 2, 3)
    assert noise.shape == (2, 3)
    assert noise[0].tolist() == pytest.approx([0.944184, -0.181741, 0.146202], abs=1e-6)
    assert not np.array_equal(noise, gumbel_noise(0, "ACD", 1, 2, 3))
    assert gumbel_noise(0, "ACD", 0, 400, 25).mean() == pytest.approx(0.5772, abs=0.04)  # Euler's constant


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_p": 1e-6}])
def test_without_chance_it_is_what_plain_generate_writes(model, settings):
    encoded = [torch.as_tensor(one) for one in PairEncoder().encode_antigens(ANTIGENS)]
    plain = [model.generate(one[None], max_new_tokens=14, do_sample=False)[0, 1:].tolist() for one in encoded]
    letters = [["".join(VOCABULARY[i] for i in ids if i > 3)] for ids in plain]
    drawn = [[(heavy + (light or ""))] for ((heavy, light, _),) in draw(model, **settings)]
    assert drawn == letters


@pytest.mark.sampled(2)
def test_the_score_is_the_loss_of_the_pair_under_the_model(model):
    """Whatever the temperature, and given the affinity that was asked for."""
    (found,) = sample_pairs(model, None, ["ACD"], num_samples=30, temperature=1.5, affinity=9.5, **LONG)
    whole = [one for one in found if not one.pair.malformed]
    assert len(whole) > 2
    for one in whole:
        rows = PairEncoder().encode_rows(["ACD"], [one.pair.heavy], [one.pair.light], [9.5])
        ids, labels = (torch.as_tensor(rows[name][0])[None] for name in ("input_ids", "labels"))
        loss = model(ids, labels=labels, affinity=torch.tensor([9.5])).loss.item()
        assert one.log_probability == pytest.approx(-loss, abs=1e-5)
        assert abs(model(ids, labels=labels).loss.item() - loss) > 1e-5  # the affinity is in it


def test_affinities_may_differ_by_antigen_and_unknown_is_none():
    model = make_generator()
    each = draw(model, num_samples=3, affinity=[9.5, None, 4.0])
    assert each[0] == draw(model, ANTIGENS[:1], num_samples=3, affinity=9.5)[0]
    assert each[1] == draw(model, ANTIGENS[1:2], num_samples=3)[0]
    assert each[1] == draw(model, ANTIGENS[1:2], num_samples=3, affinity=math.nan)[0]
    assert each != draw(model, num_samples=3)
    for one in (np.float32(9.5), torch.tensor(9.5), np.array([9.5])):
        assert draw(model, ANTIGENS[:1], num_samples=3, affinity=one) == each[:1]


def test_modes_settings_and_random_states_are_left_as_they_were():
    model = make_generator(dropout=0.5).train()
    model.encoder.eval()
    model.generation_config.repetition_penalty = 50.0  # such as a folder may bring along
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    first = draw(model, num_samples=3)
    assert (model.training, model.encoder.training, model.decoder.training) == (True, False, True)
    assert model.generation_config.repetition_penalty == 50.0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert draw(make_generator(dropout=0.5), num_samples=3) == first  # without dropout, and without that penalty


def test_scores_that_are_not_finite_are_refused():
    model = make_generator()
    with torch.no_grad():
        model.shared.weight[5] = math.nan
    with pytest.raises(DataError, match="log-probability nan: the model's scores overflow"):
        draw(model)


def test_settings_that_cannot_be_met_are_refused():
    for settings, words in (
        ({"num_samples": 0}, "num_samples=0: must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5: must be finite and not negative"),
        ({"max_new_tokens": 10**9}, "max_new_tokens=1000000000"),
        ({"top_p": 1.5}, "top_p=1.5: must be above 0 and at most 1"),
        ({"seed": -1}, "seed=-1: must be from 0"),
        ({"affinity": [8.0]}, "1 affinities for 3 antigens"),
        ({"affinity": math.inf}, "affinity=inf: must be finite"),
    ):
        with pytest.raises(ArgumentError, match=words):
            draw(make_generator(), **settings)
    with pytest.raises(ArgumentError, match=r"give a list, \[antigen\]"):
        draw(make_generator(), "ACD")
    with pytest.raises(DataError, match="'AC1'"):
        draw(make_generator(), ["AC1"])
    assert draw(make_generator(), []) == []
