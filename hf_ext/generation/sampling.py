"""Antibodies from a trained generator: the same for a seed, whatever else is written in the same batch."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..arguments.checks import ABOVE_ZERO, COUNT, SEED, Range, check_ranges
from ..data.antibodies import BOS_ID, EOS_ID, AntibodyCollator, AntibodyPair, PairEncoder, StatesOf, decode_pair
from ..data.batching import batches_by_tokens
from ..errors import ArgumentError, DataError
from ..models.generation.model import NEVER_WRITTEN, AntibodyGenerator
from ..models.generation.states import EncoderStates, as_states
from ..models.process_settings import replaced
from ..speedups.sample import evaluating

MAX_TOKENS = 320  # of a pair: no heavy chain's domain is longer than 145 residues, no light chain's than 130
# Of the recipes: at 1 every sixth antibody after stage 2 on real pairs was invalid, at 0.5 none of 200.
TEMPERATURE = 0.5
TOKENS_PER_BATCH = 32_768  # rows times the tokens of an antigen and of a pair; see `sample_pairs`
SHARE = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
_RANGES = {
    **dict.fromkeys(("num_samples", "top_k", "num_beams", "max_tokens_per_batch"), COUNT),
    "max_new_tokens": Range("from 1 to 10,000", lambda value: 1 <= value <= 10_000 and value % 1 == 0),
    "temperature": ABOVE_ZERO,
    "top_p": SHARE,
    "seed": SEED,
}


@dataclass(frozen=True)
class SampledPair:
    """An antibody that a generator wrote.

    Attributes:
        pair: as decoded; `pair.malformed` says what is wrong with its tokens.
        log_probability: mean over its tokens, `<eos>` included, nats, of the model as it is: at temperature 1, without
            top-k and top-p, given the antigen and the affinity that was asked for.
    """

    pair: AntibodyPair
    log_probability: float


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        num_samples: antibodies per antigen.
        temperature: divides the scores; below 1 the likely becomes likelier.
        top_k: only so many of the likeliest tokens; None: all.
        top_p: only the likeliest tokens that together have this probability; None: all.
        greedy: the likeliest token each time.
        num_beams: beam search, of which `num_samples` beams are kept; nothing is drawn. 1: none.
        seed: of what is drawn.
        max_new_tokens: a pair that has no end by then is cut off, and malformed.
        max_tokens_per_batch: see `sample_pairs`.

    Raises:
        ArgumentError: a value outside of its range, or several antibodies asked for where nothing is drawn.
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False
    num_beams: int = 1
    seed: int = 0
    max_new_tokens: int = MAX_TOKENS
    max_tokens_per_batch: int = TOKENS_PER_BATCH

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.greedy and self.num_beams > 1:
            raise ArgumentError(f"greedy with num_beams={self.num_beams}: choose one of the two.")
        if self.num_samples > self.num_beams and not self.draws:
            how = f"beam search with {self.num_beams} beams" if self.num_beams > 1 else "greedy decoding"
            raise ArgumentError(
                f"num_samples={self.num_samples}: {how} writes at most {self.num_beams} per antigen. Leave it out to "
                "draw antibodies instead."
            )

    @property
    def draws(self) -> bool:
        """Whether chance decides."""
        return not self.greedy and self.num_beams == 1

    @property
    def rows_per_antigen(self) -> int:
        """That `generate` is given: beams multiply by themselves."""
        return self.num_samples if self.draws else 1


def sample_pairs(
    model: AntibodyGenerator,
    tokenizer: Any,
    antigens: Sequence[str],
    *,
    num_samples: int = 1,
    affinity: float | Sequence[float | None] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    num_beams: int = 1,
    seed: int = 0,
    max_tokens_per_batch: int = TOKENS_PER_BATCH,
    max_new_tokens: int = MAX_TOKENS,
    encoder_states: StatesOf | None = None,
    show_progress: bool = True,
) -> list[list[SampledPair]]:
    """Antibodies for each antigen, in the order of `antigens`.

    What is drawn for an antigen comes from `seed`, the antigen and the sample's number alone: it does not depend on
    the other antigens, on how many samples there are, on batches or on the device. What does differ there is rounding,
    of some 1e-6, which changes a sequence only where two tokens are that close (about one in 10,000 sequences). An
    antigen that stands twice goes on where it left off: [A, A] with one sample each is [A] with two.

    Args:
        model: on any device; modes of its modules and the random states of the process are left as they were.
        tokenizer: of antigens, as of `PairEncoder`: None for the generator's own vocabulary.
        antigens: upper-case residues.
        affinity: asked for, in the units of `model.config.label_mean`: one number, or one per antigen; None or NaN:
            unknown.
        max_tokens_per_batch: sequences that are written together, times the tokens that each may have with its antigen:
            what limits memory. One at least is written whatever it says.
        encoder_states: states of antigens by their ids, in place of the encoder, as of `AntibodyCollator`.
        show_progress: a bar that counts antibodies.
        num_samples, temperature, top_k, top_p, greedy, num_beams, seed, max_new_tokens: see `Decoding`.

    Returns:
        For each antigen `num_samples` antibodies, malformed ones included.

    Raises:
        ArgumentError: as `Decoding`; an affinity that is infinite, or another number of them than of antigens.
        DataError: as `PairEncoder.encode_antigens`; or scores are not finite, as in half precision that overflows.

    Cost: each distinct antigen is encoded once. Then up to `max_new_tokens` passes of the decoder per batch, each over
    one token of every sequence.
    """
    decoding = Decoding(
        num_samples, temperature, top_k, top_p, greedy, num_beams, seed, max_new_tokens, max_tokens_per_batch
    )
    if isinstance(antigens, str):
        raise ArgumentError("antigens is one string: give a list, [antigen].")
    wanted = _affinities(affinity, len(antigens))
    requests = _number_requests(antigens, wanted, decoding)
    encoder = PairEncoder(tokenizer)
    ids = dict(zip(requests, encoder.encode_antigens(list(requests))))
    found: dict[int, list[SampledPair]] = defaultdict(list)
    num_rows = sum(map(len, requests.values()))
    with (
        _ready(model),
        torch.no_grad(),
        tqdm(total=num_rows, desc="Sampling", unit=" antibodies", disable=not show_progress, leave=False) as bar,
    ):
        collator = AntibodyCollator(encoder.antigens.pad_token_id, encoder_states)
        distinct = sorted(ids)
        for chosen in batches_by_tokens([len(ids[antigen]) for antigen in distinct], max_tokens_per_batch):
            group = [distinct[i] for i in chosen]
            states, mask = _encode(model, collator, [ids[antigen] for antigen in group])
            rows = [_Row(place, antigen, *one) for place, antigen in enumerate(group) for one in requests[antigen]]
            for batch in _cut(rows, mask.shape[1], decoding):
                for row, pairs in zip(batch, _write(model, states, mask, batch, decoding)):
                    found[row.request] += pairs
                bar.update(len(batch))
    return [found[request] for request in range(len(antigens))]


@dataclass(frozen=True)
class _Row:
    """A sequence to write: its antigen's place among those encoded together, and which request it answers."""

    place: int
    antigen: str
    request: int
    number: int
    affinity: float


class _SeededChoice(LogitsProcessor):
    """Makes greedy decoding draw: the likeliest token after Gumbel noise is a draw from the softmax.

    Noise is given per row, so that a row does not depend on its neighbours as with torch's one stream for all.

    Args:
        warpers: applied before.
        noise: (rows, tokens, vocabulary), float32.
    """

    def __init__(self, warpers: Sequence[LogitsProcessor], noise: torch.Tensor):
        self.warpers, self.noise = warpers, noise

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float()
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        return scores + self.noise[:, input_ids.shape[1] - 1]  # <bos> was there before the first


def gumbel_noise(seed: int, antigen: str, number: int, num_tokens: int, width: int) -> np.ndarray:
    """(num_tokens, width), float32: the chance of one sample, the same on every machine. Cost: 0.2 ms for 320 x 25."""
    key = hashlib.blake2b(f"{seed}\0{number}\0{antigen}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_tokens * width)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0, never 1
    return -np.log(-np.log(uniform)).astype(np.float32).reshape(num_tokens, width)


def _affinities(given: float | Sequence[float | None] | None, num_antigens: int) -> list[float]:
    several: Any = given
    is_one = given is None or np.ndim(several) == 0  # NumPy's and torch's numbers too
    listed = [several] * num_antigens if is_one else [*several]
    if len(listed) != num_antigens:
        raise ArgumentError(f"{len(listed)} affinities for {num_antigens} antigens: give one, or one for each.")
    numbers = [math.nan if one is None else float(one) for one in listed]
    if infinite := [one for one in numbers if math.isinf(one)]:
        raise ArgumentError(f"affinity={infinite[0]}: must be finite, or None where none is asked for.")
    return numbers


def _number_requests(
    antigens: Sequence[str], affinities: Sequence[float], decoding: Decoding
) -> dict[str, list[tuple[int, int, float]]]:
    """Distinct antigen -> (request, number of the sample among all of the antigen, affinity) of each row."""
    rows: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for request, (antigen, affinity) in enumerate(zip(antigens, affinities)):
        for _ in range(decoding.rows_per_antigen):
            rows[antigen].append((request, seen[antigen], affinity))
            seen[antigen] += 1
    return rows


def _cut(rows: Sequence[_Row], antigen_tokens: int, decoding: Decoding) -> list[list[_Row]]:
    """Batches of nearly equal size within the budget."""
    each = decoding.num_beams * (antigen_tokens + decoding.max_new_tokens)
    num_batches = math.ceil(len(rows) / max(1, decoding.max_tokens_per_batch // each))
    return [[rows[i] for i in part] for part in np.array_split(np.arange(len(rows)), num_batches)]


def _encode(
    model: AntibodyGenerator, collator: AntibodyCollator, ids: Sequence[np.ndarray]
) -> tuple[EncoderStates, torch.Tensor]:
    """States of antigens, and the mask of their tokens."""
    batch = collator([{"input_ids": one} for one in ids])
    mask = batch["attention_mask"].to(model.device)
    if "encoder_outputs" in batch:
        return as_states(batch["encoder_outputs"][0].to(model.device)), mask
    return model.encode(batch["input_ids"].to(model.device), mask), mask


def _write(
    model: AntibodyGenerator, states: EncoderStates, mask: torch.Tensor, rows: Sequence[_Row], decoding: Decoding
) -> list[list[SampledPair]]:
    """What `generate` writes for each row."""
    kept = 1 if decoding.draws else decoding.num_samples
    settings: dict[str, Any] = {
        **{"do_sample": False, "num_beams": decoding.num_beams, "num_return_sequences": kept},
        **{"max_new_tokens": decoding.max_new_tokens, "use_cache": True},
        **{"output_logits": True, "return_dict_in_generate": True},
    }
    writer: Any = model  # typed by transformers as another mixture of classes
    output = writer.generate(
        encoder_outputs=states,
        attention_mask=mask,
        antigen_index=torch.tensor([row.place for row in rows], device=model.device),
        affinity=torch.tensor([row.affinity for row in rows], device=model.device),
        logits_processor=LogitsProcessorList(_choices(model, rows, decoding)),
        **settings,
    )
    beams = getattr(output, "beam_indices", None)
    of_tokens = writer.compute_transition_scores(output.sequences, output.logits, beams, normalize_logits=True)
    written = output.sequences[:, 1:].tolist()
    pairs = [_read(ids, scores) for ids, scores in zip(written, of_tokens.double().tolist())]
    return [pairs[start : start + kept] for start in range(0, len(pairs), kept)]


def _choices(model: AntibodyGenerator, rows: Sequence[_Row], decoding: Decoding) -> list[LogitsProcessor]:
    if not decoding.draws:
        return []
    warpers: list[LogitsProcessor] = []
    if decoding.temperature != 1:
        warpers.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k is not None:
        warpers.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None:
        warpers.append(TopPLogitsWarper(decoding.top_p))
    shape = (decoding.max_new_tokens, model.config.vocab_size)
    noise = np.stack([gumbel_noise(decoding.seed, row.antigen, row.number, *shape) for row in rows])
    return [_SeededChoice(warpers, torch.from_numpy(noise).to(model.device))]


def _read(ids: Sequence[int], scores: Sequence[float]) -> SampledPair:
    num_tokens = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
    mean = math.fsum(scores[:num_tokens]) / num_tokens
    if not math.isfinite(mean):
        raise DataError(
            f"A pair has log-probability {mean}: the model's scores overflow. Sample in float32, or take another model."
        )
    return SampledPair(decode_pair([BOS_ID, *ids]), mean)  # else a <bos> that it wrote itself would pass


@contextmanager
def _ready(model: AntibodyGenerator) -> Iterator[None]:
    """Evaluation mode, and no generation settings but those asked for here; both as before afterwards.

    Settings that lie beside a model (generation_config.json) would go over ours without a word.
    """
    settings = GenerationConfig.from_model_config(model.config)
    settings.suppress_tokens = NEVER_WRITTEN
    with replaced(model, generation_config=settings), evaluating(model):
        yield
