"""A trained generator from its folder or the Hub, and antibodies from it: the same for a seed, whatever the batch."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ..arguments import COUNT, NOT_NEGATIVE, SEED, Range, check_ranges
from ..checkpoints import MODEL_MANIFEST, open_model
from ..data import (
    ANTIGEN_TOKENIZER,
    BOS_ID,
    EOS_ID,
    AntibodyCollator,
    AntibodyPair,
    PairEncoder,
    StatesOf,
    batches_by_tokens,
    decode_pair,
)
from ..errors import ArgumentError, DataError
from ..files import parse_json
from ..models import NEVER_WRITTEN, AntibodyGenerator, EncoderStates, GeneratorConfig, load_tokenizer, replaced
from ..pretrained import fetch_folder, reading
from ..property import find_device
from ..speedups import evaluating
from ..text import is_watched

MAX_TOKENS = 320  # of a pair: no heavy chain's domain is longer than 145 residues, no light chain's than 130
# Of the recipes: at 1 every sixth antibody after stage 2 on real pairs was invalid, at 0.5 none of 200.
TEMPERATURE = 0.5
TOKENS_PER_BATCH = 32_768  # rows times the tokens of an antigen and of a pair; see `sample_pairs`
RANGES = {
    **dict.fromkeys(("num_samples", "max_tokens_per_batch"), COUNT),
    "max_new_tokens": Range("from 1 to 10,000", lambda value: 1 <= value <= 10_000 and value % 1 == 0),
    "temperature": NOT_NEGATIVE,
    "top_p": Range("above 0 and at most 1", lambda value: 0 < value <= 1),
    "seed": SEED,
}

# What a model needs; never pickled weights, whatever else lies in a repository.
_FILES = [
    *("config.json", "generation_config.json", "inputs.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "tokenizers/*", MODEL_MANIFEST),
]


def load_generator(
    name_or_path: str | Path, *, revision: str | None = None, device: str | torch.device | None = None
) -> tuple[AntibodyGenerator, Any]:
    """Loads what `hf-ext generate` wrote: verified, from safetensors alone, without code of its own.

    Args:
        name_or_path: folder or Hub id. A folder of that name comes first.
        revision: commit, tag or branch of a Hub model; a commit makes samples repeatable.
        device: None takes the accelerator where there is one, else the CPU.

    Returns:
        The model, in evaluation mode, and the tokenizer of its antigens, as of `PairEncoder`: None for the generator's
        own.

    Raises:
        ArgumentError: no such model, one of another kind or damaged, files that are not those of its manifest, or an
            encoder that it refers to is not there.

    Cost: one read of the files to verify them, and of a Hub model one download, which the Hub's cache keeps.
    """
    folder = fetch_folder(name_or_path, revision, _FILES)
    remedy = "Give the output folder of hf-ext generate, or the Hub id it was pushed to."
    with reading(f"Model {name_or_path}: no config.json with a model_type there", folder, remedy):
        kind = parse_json((folder / "config.json").read_bytes())["model_type"]
    if kind != GeneratorConfig.model_type:
        raise ArgumentError(f"Model {name_or_path} is of type {kind!r}, not a generator of antibodies. {remedy}")
    model = open_model(AntibodyGenerator, folder)
    tokenizer = None
    own = folder / ANTIGEN_TOKENIZER
    if model.config.architecture == "esm":
        spec = model.encoder.spec
        tokenizer = load_tokenizer(str(own)) if own.is_dir() else load_tokenizer(spec.name_or_path, spec.revision)
    return model.to(find_device() if device is None else device).eval(), tokenizer


@dataclass(frozen=True)
class SampledPair:
    """An antibody that a generator wrote.

    Attributes:
        pair: as decoded; `pair.malformed` says what is wrong with its tokens.
        log_probability: mean over its tokens, `<eos>` included, nats, of the model as it is: at temperature 1, without
            top-p, given the antigen and the affinity that was asked for.
    """

    pair: AntibodyPair
    log_probability: float


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        num_samples: antibodies per antigen.
        temperature: divides the scores; below 1 the likely becomes likelier. 0: the likeliest token each time.
        top_p: only the likeliest tokens that together have this probability; None: all.
        seed: of what is drawn.
        max_new_tokens: a pair that has no end by then is cut off, and malformed.
        max_tokens_per_batch: see `sample_pairs`.

    Raises:
        ArgumentError: a value outside of its range.
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float | None = None
    seed: int = 0
    max_new_tokens: int = MAX_TOKENS
    max_tokens_per_batch: int = TOKENS_PER_BATCH

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


def sample_pairs(
    model: AntibodyGenerator,
    tokenizer: Any,
    antigens: Sequence[str],
    *,
    affinity: float | Sequence[float | None] | None = None,
    encoder_states: StatesOf | None = None,
    show_progress: bool = True,
    **settings: Any,
) -> list[list[SampledPair]]:
    """Samples antibodies for each antigen, in the order of `antigens`.

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
        encoder_states: states of antigens by their ids, in place of the encoder, as of `AntibodyCollator`.
        show_progress: a bar that counts antibodies.
        settings: num_samples, temperature, top_p, seed, max_new_tokens: see `Decoding`; and max_tokens_per_batch:
            sequences that are written together, times the tokens that each may have with its antigen: what limits
            memory. One at least is written whatever it says.

    Returns:
        For each antigen `num_samples` antibodies, malformed ones included.

    Raises:
        ArgumentError: as `Decoding`; an affinity that is infinite, or another number of them than of antigens.
        DataError: as `PairEncoder.encode_antigens`; or scores are not finite, as in half precision that overflows.

    Cost: each distinct antigen is encoded once. Then up to `max_new_tokens` passes of the decoder per batch, each over
    one token of every sequence.
    """
    decoding = Decoding(**settings)
    if isinstance(antigens, str):
        raise ArgumentError("antigens is one string: give a list, [antigen].")
    rows: dict[str, list[_Row]] = defaultdict(list)  # of each distinct antigen
    for request, (antigen, wanted) in enumerate(zip(antigens, _affinities(affinity, len(antigens)))):
        for _ in range(decoding.num_samples):
            rows[antigen].append(_Row(antigen, request, len(rows[antigen]), wanted))
    encoder = PairEncoder(tokenizer)
    distinct = list(rows)
    ids = encoder.encode_antigens(distinct)
    collator = AntibodyCollator(encoder.antigens.pad_token_id, encoder_states)
    found: list[list[SampledPair]] = [[] for _ in antigens]
    # Settings that lie beside a model (generation_config.json) would go over ours without a word.
    generation = GenerationConfig.from_model_config(model.config)
    generation.suppress_tokens = NEVER_WRITTEN
    with (
        replaced(model, generation_config=generation),
        evaluating(model),
        torch.no_grad(),
        tqdm(
            total=len(antigens) * decoding.num_samples,
            desc="Sampling",
            unit=" antibodies",
            disable=not (show_progress and is_watched()),
            leave=False,
        ) as bar,
    ):
        for group in batches_by_tokens([len(one) for one in ids], decoding.max_tokens_per_batch):
            batch = collator([{"input_ids": ids[i]} for i in group])
            mask = batch["attention_mask"].to(model.device)
            given = batch.get("encoder_outputs")
            read = None if given else batch["input_ids"].to(model.device)
            states = model.encode(read, mask, given and given[0].to(model.device))
            todo = [(place, row) for place, i in enumerate(group) for row in rows[distinct[i]]]
            size = max(1, decoding.max_tokens_per_batch // (mask.shape[1] + decoding.max_new_tokens))
            for start in range(0, len(todo), size):
                batch_rows = todo[start : start + size]
                for (_, row), pair in zip(batch_rows, _write(model, states, mask, batch_rows, decoding)):
                    found[row.request].append(pair)
                bar.update(len(batch_rows))
    return found


@dataclass(frozen=True)
class _Row:
    """A sequence to write: its antigen, the request that it answers, its number among the antigen's samples."""

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

    def __init__(self, warpers: Sequence[LogitsProcessor], noise: Tensor):
        self.warpers = warpers
        self.noise = noise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        return scores + self.noise[:, input_ids.shape[1] - 1]  # <bos> was there before the first


def gumbel_noise(seed: int, antigen: str, number: int, num_tokens: int, width: int) -> np.ndarray:
    """Draws noise of one sample, (num_tokens, width), float32, the same on every machine. Cost: 0.2 ms for 320 x 25."""
    key = hashlib.blake2b(f"{seed}\0{number}\0{antigen}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_tokens * width)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0, never 1
    return -np.log(-np.log(uniform)).astype(np.float32).reshape(num_tokens, width)


def _affinities(given: Any, num_antigens: int) -> list[float]:
    is_one = given is None or np.ndim(given) == 0  # NumPy's and torch's numbers too
    listed = [given] * num_antigens if is_one else [*given]
    if len(listed) != num_antigens:
        raise ArgumentError(f"{len(listed)} affinities for {num_antigens} antigens: give one, or one for each.")
    numbers = [math.nan if one is None else float(one) for one in listed]
    if infinite := [one for one in numbers if math.isinf(one)]:
        raise ArgumentError(f"affinity={infinite[0]}: must be finite, or None where none is asked for.")
    return numbers


def _write(
    model: Any, states: EncoderStates, mask: Tensor, rows: Sequence[tuple[int, _Row]], decoding: Decoding
) -> list[SampledPair]:
    """Samples a pair for each row, whose antigen stands at its place in `states`."""
    choices: list[LogitsProcessor] = []
    if decoding.temperature > 0:
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(decoding.temperature))]
        if decoding.top_p is not None:
            warpers.append(TopPLogitsWarper(decoding.top_p))
        shape = (decoding.max_new_tokens, model.config.vocab_size)
        noise = np.stack([gumbel_noise(decoding.seed, row.antigen, row.number, *shape) for _, row in rows])
        choices = [_SeededChoice(warpers, torch.from_numpy(noise).to(model.device))]
    output = model.generate(
        encoder_outputs=states,
        attention_mask=mask,
        antigen_index=torch.tensor([place for place, _ in rows], device=model.device),
        affinity=torch.tensor([row.affinity for _, row in rows], device=model.device),
        logits_processor=LogitsProcessorList(choices),
        do_sample=False,
        max_new_tokens=decoding.max_new_tokens,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    of_tokens = model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
    written = output.sequences[:, 1:].tolist()
    return [_read(ids, scores) for ids, scores in zip(written, of_tokens.double().tolist())]


def _read(ids: Sequence[int], scores: Sequence[float]) -> SampledPair:
    num_tokens = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
    mean = math.fsum(scores[:num_tokens]) / num_tokens
    if not math.isfinite(mean):
        raise DataError(
            f"A pair has log-probability {mean}: the model's scores overflow. Sample in float32, or take another model."
        )
    return SampledPair(decode_pair([BOS_ID, *ids]), mean)  # else a <bos> that it wrote itself would pass
