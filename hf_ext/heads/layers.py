"""`--layer auto`: the layer of each frozen encoder whose embeddings predict best the rows that a fit has not seen."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..baselines import TOKENS_PER_BATCH, solve_ridges
from ..checkpoints import CheckpointStore, find_model
from ..data import FloatArray, batches_by_tokens, draw_rows, join_windows, label_array, read_columns
from ..embeddings import factorize, take_rows
from ..evaluation import ResamplingGroups, compare_paired
from ..files import Facts, Json
from ..hardware import detect_hardware
from ..labels import BoolArray, Float32Array, LabelKind
from ..models import (
    AUTO_LAYER,
    AffinityModel,
    ModelArguments,
    Pooling,
    final_norm_of,
    layers_of,
    load_encoder,
)
from ..text import format_cell
from .ensemble import Groups, make_folds
from .objectives import ALPHAS, Folds
from .resolving import read_config_of, why_not_fitted

NUM_LAYERS = 6  # of an encoder that are compared, evenly spaced: neighbours hardly differ
MAX_ROWS = (4_000, 2_000)  # of training and of validation
ENOUGH_ROWS = 1_000  # of validation: test rows differ from training as they do, so folds of training add nothing
# Of the hidden layer of the network that compares: its weights are random, so that its output is a ridge regression (A.
# Rahimi, B. Recht, Random Features for Large-Scale Kernel Machines, 2007), and not linear, as heads are not. On TAPE's
# stability the interval of a linear one was as wide, and its improvement half as large.
NUM_HIDDEN = 1024
WEIGHT_STD = 2.0
MAX_CLASSES = 64  # that are compared
CONSTANT_STD = 1e-6  # a standard deviation below it is rounding


def find_known_layers(args: ModelArguments, training: Any, explicit: Collection[str]) -> Json:
    """Finds what an earlier run chose: of the checkpoint that this run goes on from, else of `--init_head_from`.

    Args:
        args, training: as parsed.
        explicit: names of the arguments that the user set.

    Returns:
        `encoders` and `layer_choice` as `AffinityConfig` has them; empty where there is no such run, or `--layer` says
        which.

    Raises:
        CheckpointError: a checkpoint that was named does not verify.
        ArgumentError: `--init_head_from` is no trained model.
    """
    is_auto = args.layer == AUTO_LAYER
    found = None
    store = CheckpointStore(training.output_dir)
    asked = training.resume_from_checkpoint or training.resume
    if is_auto and asked not in ("auto", "no"):
        found = store.open(asked)
    elif is_auto and asked == "auto" and training.world_size == 1:  # several processes choose no layers
        found = store.find_newest()
    folder = found.path if found else None
    if folder is None and args.init_head_from and (is_auto or "layer" not in explicit):
        folder = find_model(args.init_head_from)
    return {} if folder is None else read_config_of(folder)


def why_last(args: ModelArguments, training: Any, is_stream: bool, kind: LabelKind) -> str | None:
    """Returns why `--layer auto` reads the last layer in a run, without comparing."""
    return kind.why_last_layer or why_not_fitted(args, training, is_stream)


def choose_layers(
    model: AffinityModel,
    collator: Any,
    splits: Facts,
    groups: Groups,
    args: Any,
    known: dict[Any, Any] | None = None,
) -> Json:
    """Sets the layer that is read of each encoder whose inputs vary, one encoder after the other.

    Up to `NUM_LAYERS` layers are compared by networks with one random hidden layer on the embeddings of all inputs: by
    the RMSE of the validation rows, and where these are few of four folds of training too, each predicted by a fit
    without it. Classes are compared by numbers that are 1 where a row has the class, else 0. Another layer than the
    last is taken if it is better by the whole interval of a paired bootstrap.

    Args:
        model: of frozen encoders, not trained yet.
        collator: makes its inputs.
        splits: map-style train and validation.
        groups: of each training and each validation row what was held out together: no fold cuts one, and the bootstrap
            draws it whole. None: rows.
        args: of the training: device and seed.
        known: embeddings that other runs of the same encoders have computed; filled.

    Returns:
        What was compared, JSON-able; also in `model.config.layer_choice`.

    Cost: 4,000 training and 2,000 validation rows at most pass through the encoders once, in bfloat16 where that is
    fast; then fits, on one core 10 s with enough validation rows, else half a minute. Same rows and seed, same layers.
    """
    began = time.perf_counter()
    asked = (splits["train"], splits["validation"])
    drawn = [draw_rows(len(rows), args.seed, most) for rows, most in zip(asked, MAX_ROWS)]
    rows = [split.select(chosen) for split, chosen in zip(asked, drawn)]
    every = np.concatenate([label_array(split, model.config.kind) for split in rows])
    labels, is_known = model.config.kind.as_columns(every, MAX_CLASSES, CONSTANT_STD)
    together = groups and [[of[i] for i in chosen] for of, chosen in zip(groups, drawn)]
    folds = make_folds(len(rows[0]), len(rows[1]), None, together, args.seed)
    if len(rows[1]) >= ENOUGH_ROWS:
        del folds[1:]
    seen = np.concatenate(folds)
    drawn_whole = together and ResamplingGroups.of("", [*chain(*together)]).select(seen)
    features = _embed(model, collator, rows, args.device, {} if known is None else known)
    compared = []
    for index, spec in enumerate(model.config.encoder_specs):
        own = [name for name in features if model.tower_of(name).encoder == index and len(features[name]) > 1]
        missed: dict[int, FloatArray] = {}  # of each row, by how much its layer's prediction does
        for layer in features[own[0]] if own else ():
            blocks = [of[layer if name in own else max(of)] for name, of in features.items()]
            predicted = _predict_unseen(np.concatenate(blocks, axis=1), labels, is_known, folds, args.seed)
            squares = np.where(is_known, predicted - labels, 0) ** 2
            means = squares.sum(1) / is_known.sum(1).clip(1)
            missed[layer] = np.sqrt(means)[seen]
        if len(missed) < 2:
            continue
        last = max(missed)
        errors = {layer: float(np.sqrt(np.mean(each**2))) for layer, each in missed.items()}
        best = min(errors, key=lambda layer: errors[layer])
        zeros = np.zeros(len(seen))
        result = compare_paired(
            zeros,
            missed[last],
            missed[best],
            "rmse",
            seed=args.seed,
            groups=drawn_whole,
        )
        chosen = best if result.is_better else last
        for name in own:
            features[name] = {chosen: features[name][chosen]}
        if chosen != last:
            model.read_layer(index, chosen)
        found = {
            "name": spec.name_or_path,
            "num_layers": last,
            "layer": chosen,
            "best": best,
            "lower_by": result.improvement,
            "low": result.low,
            "high": result.high,
            "errors": {str(layer): error for layer, error in errors.items()},
        }
        compared.append(found)
    model.config.layer_choice = {
        "encoders": compared,
        "num_rows": len(seen),
        "num_folds": len(folds),
        "seconds": time.perf_counter() - began,
    }
    return model.config.layer_choice


def _embed(
    model: AffinityModel, collator: Any, rows: Sequence[Any], device: Any, known: dict[Any, Any]
) -> dict[str, dict[int, Float32Array]]:
    """Embeds all rows by input and layer, (n, width); inputs that are the same in all rows, at one layer."""
    features = {}
    for index, spec in enumerate(model.config.encoder_specs):
        encoder: Any = load_encoder(spec).to(device).eval()
        for tower in (one for one in model.config.tower_specs if one.encoder == index):
            for name in tower.names:
                cells = [cell for split in rows for cell in read_columns(split, collator.columns[name])]
                numbers, inputs = factorize(cells, name in collator.optional_inputs)
                layers = {len(layers_of(encoder))}
                if len(inputs) > 1:
                    layers = {-(-depth * i // NUM_LAYERS) for depth in layers for i in range(1, NUM_LAYERS + 1)}
                tokenize = partial(collator.encode, name)
                stored = known.setdefault((name, *sorted(layers)), {})
                new = [parts for parts in inputs if parts not in stored]
                tables = _embed_layers(encoder, tokenize, new, model.pooling_of(name), sorted(layers))
                stored.update(zip(new, zip(*tables.values())))
                found = zip(*(stored[parts] for parts in inputs))
                tables = {layer: torch.stack(each) for layer, each in zip(tables, found)}
                places = torch.from_numpy(numbers)
                blocks = {layer: take_rows(table, places) for layer, table in tables.items()}
                for block in blocks.values():
                    block[places < 0] = block[places >= 0].mean(0)  # of rows that lack it, as the head reads it
                features[name] = {layer: block.numpy() for layer, block in blocks.items()}
    return {name: features[name] for name in model.embedding_sizes}


@torch.no_grad()
def _embed_layers(
    encoder: Any,
    tokenize: Any,
    inputs: Sequence[tuple[str, ...]],
    pool: Pooling,
    layers: Sequence[int],
) -> dict[int, Tensor]:
    """Embeds distinct inputs by layer, (inputs, width) float32 on the CPU, as if it were the last."""
    norm = final_norm_of(encoder)
    is_fast = detect_hardware(encoder.device).native_bf16
    tables = {layer: torch.empty(len(inputs), encoder.config.hidden_size) for layer in layers}
    batch: dict[str, Tensor] = {}
    chosen: list[int] = []

    def keep(table: Tensor, module: Any, given: Any, output: Any) -> None:
        states = output if torch.is_tensor(output) else output[0]
        table[chosen] = pool(*join_windows(norm(states), batch)).cpu()

    hooks = [layers_of(encoder)[i - 1].register_forward_hook(partial(keep, table)) for i, table in tables.items()]
    lengths = [sum(map(len, parts)) for parts in inputs]
    for chosen in batches_by_tokens(lengths, TOKENS_PER_BATCH):
        columns = zip(*(inputs[i] for i in chosen))
        batch = {key: value.to(encoder.device) for key, value in tokenize(*columns).items()}
        given = {key: batch[key] for key in batch.keys() & {"input_ids", "attention_mask", "token_type_ids"}}
        with torch.autocast(encoder.device.type, torch.bfloat16, is_fast):
            encoder(**given)
    for hook in hooks:
        hook.remove()
    return tables


def _predict_unseen(
    features: Float32Array,
    labels: FloatArray,
    is_known: BoolArray,
    folds: Folds,
    seed: int,
) -> FloatArray:
    """Predicts each row, (n, k), by a random hidden layer and a ridge regression without the row's fold."""
    generator = np.random.default_rng(seed)
    width = features.shape[1]
    scaled = (features - features.mean(0)) / np.maximum(features.std(0), CONSTANT_STD)
    weights = generator.normal(0, WEIGHT_STD / np.sqrt(width), (width, NUM_HIDDEN)).astype(np.float32)
    biases = generator.normal(size=NUM_HIDDEN).astype(np.float32)
    hidden = np.maximum(scaled @ weights + biases, 0)
    predicted = np.zeros((len(ALPHAS), *labels.shape))
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(labels)), fold)
        slopes, intercepts = solve_ridges(hidden[rest], labels[rest], ALPHAS, standardize=False)
        of_fold = np.tensordot(hidden[fold], slopes, 1).swapaxes(0, 1)
        predicted[:, fold] = of_fold + intercepts[:, None]
    seen = np.concatenate(folds)
    errors = [np.square(one - labels)[seen][is_known[seen]].mean() for one in predicted]
    return predicted[np.argmin(errors)]


def describe_layers(facts: Facts) -> list[str]:
    """Describes for each encoder, in a sentence, which layer is read, and why."""
    sentences = []
    for found in facts.get("encoders", ()):
        num = found["num_layers"]
        best = found["best"]
        ends = "" if found["low"] is None else f" [{format_cell(found['low'])}, {format_cell(found['high'])}]"
        lower = f"on {facts['num_rows']:,} held-out rows its error is lower by {format_cell(found['lower_by'])}{ends}"
        why = f"compared with the last, {lower}; layers above are dropped"
        if found["layer"] == num:
            why = f"next would be layer {best}; {lower}, which chance explains" if best != num else "the best of all"
        sentences.append(f"Layer: {found['layer']} of {num} of {Path(found['name']).name}: {why}.")
    return sentences
