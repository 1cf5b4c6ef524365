"""From arguments to a model, and to the collator that makes its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from datasets import Dataset

from ..checkpoints import find_model
from ..data import NUMBERS, DataArguments, NumberColumns, ResidueTokenizer, SequenceCollator, make_demo_table
from ..embeddings import VectorFile
from ..errors import ArgumentError
from ..files import Json
from ..hardware import Hardware, detect_hardware
from ..labels import LabelKind
from ..models import (
    FAMILIES,
    LIKELIHOOD,
    ONE_LAYER,
    VECTORS,
    AffinityModel,
    EncoderSpec,
    LoraSettings,
    TowerSpec,
    Training,
    choose_encoder,
    identify_encoder,
    limit_of_positions,
    load_tokenizer,
    read_encoder,
)
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .predictor import load_model

TRAININGS = ("frozen", "lora", "full")
OF_CONFIG = ("head_sizes", "head_dropout", "loss", "focal_gamma", "save_full", "distill_weight", "distill_temperature")


def resolve_training(args: AffinityArguments, use_peft: bool) -> tuple[list[str], bool]:
    """Resolves what `--tower_training` and `--use_peft` mean together: how towers train, and whether any has adapters.

    Raises:
        ArgumentError: `--use_peft` asks for adapters, and no tower gets any.
    """
    trainings = args.tower_training or ["lora" if use_peft else "frozen"]
    if use_peft and "lora" not in trainings:
        raise ArgumentError(
            f"--use_peft and --tower_training {' '.join(trainings)} contradict each other: leave one of them out, or "
            "say lora for the towers that get adapters."
        )
    return trainings, "lora" in trainings


def resolve_residue_steps(
    args: FastTrainingArguments, kind: LabelKind, num_rows: int | None, trains_encoders: bool
) -> str:
    """Makes batches smaller and epochs fewer where each residue has a label, unless the user set them.

    Says so, else "".

    As many epochs as give the steps of `kind`, at least 3 and at most those that `args` has.

    Args:
        args: of the training, changed in place.
        num_rows: of training; None of a stream.
        trains_encoders: as `--tower_training` says; `--use_peft` does, too.
    """
    steps = kind.steps
    if steps is None:
        return ""
    if not args.explicit_fields & {"per_device_train_batch_size", "effective_batch_size", "cached_batch_size"}:
        args.per_device_train_batch_size = min(steps.rows, args.per_device_train_batch_size)
        args.cached_batch_size = None
    if num_rows is None or args.explicit_fields & {"max_steps", "num_train_epochs"}:
        return ""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows = args.effective_batch_size or rows
    most = steps.steps if trains_encoders or args.use_peft else steps.frozen
    args.num_train_epochs = min(args.num_train_epochs, max(steps.min_epochs, -(-most * rows // num_rows)))
    return (
        f"Each residue has a label, so {args.num_train_epochs:g} epochs of {rows:,} rows a step, if not set otherwise."
    )


def resolve_encoders(args: AffinityArguments, training: Any, hardware: Hardware) -> str:
    """Takes the encoder that suits this machine where `--encoders` was left out; says so in a sentence, else ""."""
    if args.encoders or args.embeddings:
        return ""
    hardest: Training = "frozen"
    how = args.tower_training or []
    if "full" in how:
        hardest = "full"
    elif "lora" in how or training.use_peft:
        hardest = "lora"
    args.encoders = [choose_encoder(hardware, hardest).name]
    return (
        f"--encoders left out: {args.encoders[0]}, the best that fits {hardware.name} and is fast enough there "
        f"({hardest}); docs/encoders.md has others."
    )


def fill_in_demo(args: AffinityArguments, data_args: DataArguments, encoders: Sequence[str]) -> Dataset:
    """Makes the arguments name the generated demo data and two encoders from `make_demo_encoders`; its table."""
    data_args.sequence_columns = ["heavy", "light", "antigen"]
    data_args.label_column = ["pKd"]
    args.encoders = [*encoders]
    args.tower_inputs = ["heavy,light", "antigen"]
    if args.binder_threshold is None:
        args.binder_threshold = 9.0
    return make_demo_table()


def build_model(
    args: AffinityArguments,
    sequence_columns: Sequence[str],
    lora: LoraSettings | None = None,
    kind: LabelKind | None = None,
    layers: Sequence[int | None] = (),
    numbers: Json | None = None,
) -> AffinityModel:
    """Builds a model with pretrained encoders, and a head for `kind`, untrained or from `args.init_head_from`.

    Args:
        kind: of label; None: one number.
        layers: of each encoder the one that is read, where they are known and `args` has none.
        numbers: `NumberColumns.state()` of columns beside sequences.

    Raises:
        ArgumentError: as `read_towers`, or a head that does not fit.
    """
    specs, towers = read_towers(args, sequence_columns, lora)
    for spec, layer in zip(specs, layers):
        spec.layer = layer
    model = AffinityModel.from_encoders(specs, towers, **model_settings(args, kind, numbers))
    if args.init_head_from:
        carry_head(model, args.init_head_from)
    return model


def model_settings(
    args: AffinityArguments, kind: LabelKind | None = None, numbers: Json | None = None
) -> dict[str, Any]:
    """Returns what `AffinityConfig` takes besides encoders and towers."""
    form: str | None = args.head if args.head in ONE_LAYER else None
    if args.objective == LIKELIHOOD:
        form = LIKELIHOOD
    given = {name: getattr(args, name) for name in OF_CONFIG}
    return {**given, "head_form": form, "label_kind": kind and kind.stored, NUMBERS: numbers}


def read_towers(
    args: AffinityArguments, sequence_columns: Sequence[str], lora: LoraSettings | None = None
) -> tuple[list[EncoderSpec], list[TowerSpec]]:
    """Reads encoders, each once, and the towers that read them; no weights are loaded.

    Raises:
        ArgumentError: no encoder, towers that do not cover the columns, an encoder that cannot be read or has no first
            token to pool.
    """
    if args.embeddings:
        if args.trains_encoders:
            raise ArgumentError("--embeddings: there is no encoder that could train. Leave it, or --use_peft, out.")
        vectors = VectorFile(args.embeddings)
        shape = {"model_type": VECTORS, "hidden_size": vectors.width}
        return [EncoderSpec(VECTORS, shape)], [TowerSpec(0, [[column] for column in sequence_columns])]
    if not args.encoders:
        raise ArgumentError(f"No encoder: give --encoders, for example {choose_encoder(detect_hardware()).name}.")
    trainings = args.per_tower("tower_training") if args.tower_training else ["frozen"] * len(args.encoders)
    unknown = sorted(set(trainings) - set(TRAININGS))
    if unknown:
        raise ArgumentError(f"--tower_training {unknown}: allowed are {', '.join(TRAININGS)}.")
    revisions = args.per_tower("encoder_revisions") if args.encoder_revisions else [None] * len(args.encoders)

    identities = [*zip(args.encoders, revisions, trainings)]
    distinct = [*dict.fromkeys(identities)]
    how_to_read = lora or LoraSettings(), args.layer_number, args.objective == LIKELIHOOD
    specs = [read_encoder(name, at, cast(Training, how), *how_to_read) for name, at, how in distinct]
    towers = []
    for identity, columns, pooling in zip(identities, tower_inputs(args, sequence_columns), args.per_tower("pooling")):
        index = distinct.index(identity)
        model_type = specs[index].config["model_type"]
        if pooling == "cls" and not FAMILIES[model_type].has_first_token:
            raise ArgumentError(
                f"--pooling cls for {identity[0]!r}: the first token of a model of type {model_type!r} does not stand "
                "for the sequence. Give mean (over residues) or mean_tokens (over all tokens)."
            )
        towers.append(TowerSpec(index, columns, pooling))
    return specs, towers


def carry_head(model: AffinityModel, name_or_path: str) -> None:
    """Gives `model` the network of a run with frozen encoders, with its label and embedding scales.

    The encoders must be the same ones; in `model` they may train. As adapters start at zero, it then predicts what that
    run predicts, up to the precision in which its embeddings were computed.

    Raises:
        ArgumentError: as `find_model`; a model that was never trained or whose encoders have changed; or other inputs,
            encoders, pooling or head sizes, and all differences are named.
    """
    source = load_model(find_model(name_or_path))
    told = f"--init_head_from {name_or_path}: "
    if not source.config.is_scaled:
        raise ArgumentError(f"{told}that model has never been trained.")
    if trained := sorted({spec.training for spec in source.config.encoder_specs} - {"frozen"}):
        raise ArgumentError(
            f"{told}its encoders were trained too ({', '.join(trained)}), so its head fits no others. Give the folder "
            "of a run with frozen encoders."
        )
    here = _what_a_head_reads(model)
    there = _what_a_head_reads(source)
    differences = [f"  {name}: {there[name]} there, {here[name]} here" for name in here if here[name] != there[name]]
    if differences:
        raise ArgumentError("\n".join([f"{told}that head does not fit:", *differences]))
    model.head.load_state_dict(source.head.state_dict())
    for name in ("label_mean", "label_std", "is_scaled"):
        setattr(model.config, name, getattr(source.config, name))


def _what_a_head_reads(model: AffinityModel) -> dict[str, Any]:
    towers = [model.tower_of(name) for name in model.embedding_sizes]
    specs = [model.config.encoder_specs[tower.encoder] for tower in towers]
    return {
        "inputs": [*model.embedding_sizes],
        "encoders": [identify_encoder(replace(spec, layer=None)) for spec in specs],
        "layers": [spec.layer or "last" for spec in specs],
        "pooling": [tower.pooling for tower in towers],
        "head": model.config.head_form or "mlp",
        "head sizes": model.config.head_sizes,
        "labels": model.config.label_kind,
        "columns beside sequences": model.config.numbers,
    }


def tower_inputs(args: AffinityArguments, sequence_columns: Sequence[str]) -> list[list[list[str]]]:
    """Returns per tower its inputs, per input its columns; see the help of `--tower_inputs`.

    Raises:
        ArgumentError: the assignment is not clear, or does not use each sequence column exactly once.
    """
    if args.tower_inputs:
        if len(args.tower_inputs) != len(args.encoders):
            raise ArgumentError(
                f"--tower_inputs has {len(args.tower_inputs)} entries for {len(args.encoders)} encoders."
            )
        towers = [[part.split("+") for part in entry.split(",")] for entry in args.tower_inputs]
    elif len(args.encoders) == 1:
        towers = [[[column] for column in sequence_columns]]
    elif len(args.encoders) == len(sequence_columns):
        towers = [[[column]] for column in sequence_columns]
    else:
        raise ArgumentError(
            f"{len(args.encoders)} encoders for {len(sequence_columns)} sequence columns: say which reads which, for "
            f"example --tower_inputs {sequence_columns[0]} {','.join(sequence_columns[1:])}."
        )
    used = [column for tower in towers for columns in tower for column in columns]
    if sorted(used) != sorted(sequence_columns):
        raise ArgumentError(f"Towers read {used}; the sequence columns are {[*sequence_columns]}: each exactly once.")
    return towers


def build_collator(model: AffinityModel, data_args: DataArguments, max_length: int | None = None) -> SequenceCollator:
    """Builds the collator for a model's inputs, with each encoder's own tokenizer and length limit.

    Args:
        max_length: the limit, in tokens, special ones included; that of a table of positions is only lowered.

    Raises:
        ArgumentError: `max_length` leaves no room for residues, or no encoder has so many positions.
    """
    specs = model.config.encoder_specs
    tables = [limit_of_positions(spec.config) for spec in specs]
    if max_length is not None and all(tables) and max_length > max(table or 0 for table in tables):
        raise ArgumentError(
            f"--max_length {max_length}: {specs[0].name_or_path!r} has positions for {tables[0]} tokens. Leave it out, "
            "and longer proteins are read in windows (--too_long window), or take an encoder without a table of "
            "positions (ESM-2, ESM C)."
        )
    loaded = [load_tokenizer(spec.name_or_path, spec.revision) for spec in specs]
    tokenizers = {}
    for name, columns in model.config.input_columns.items():
        index = model.tower_of(name).encoder
        own = tables[index] or loaded[index].model_max_length
        limit = min(max_length or own, tables[index] or max_length or own)
        tokenizers[name] = ResidueTokenizer(loaded[index], len(columns), limit)
        if limit == max_length:
            tokenizers[name].limited_by = f"--max_length {max_length} allows"
    given = data_args.too_long, [*data_args.missing_chains], model.config.kind
    numbers = NumberColumns.from_state(model.config.numbers)
    collator = SequenceCollator(tokenizers, model.config.input_columns, *given, numbers)
    collator.resolve_long(None, data_args.max_residues)
    return collator
