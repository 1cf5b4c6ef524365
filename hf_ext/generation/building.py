"""From arguments and rows to model, tokens, states of a frozen encoder, collator and trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from ..data import AntibodyCollator, PairEncoder, ResidueTokenizer, StatesOf, make_demo_pairs
from ..embeddings import SHARD_STATES, EmbeddingStore, StateTable, fill_store
from ..errors import ArgumentError
from ..models import (
    AntibodyGenerator,
    GeneratorConfig,
    limit_of_positions,
    load_tokenizer,
    read_encoder,
    state_encoder,
    state_key,
)
from ..speedups import lora_settings
from .arguments import GeneratorArguments
from .preparing import PairData
from .rows import AntibodyRows

ENCODING_TOKENS = 8192  # per batch of antigens
DEMO_SHAPE = {"d_model": 32, "hidden_size": 64}
# Each antigen has one antibody there: at less than 1 all its samples would be that one.
DEMO_SETTINGS = {"attend": True, "dropout": 0.0, "temperature": 1.0}
DEMO_TRAINING = {"learning_rate": 1e-2, "per_device_train_batch_size": 16}  # small models: larger steps, and more


@dataclass
class Inputs:
    """How antigens and antibodies become tokens, the same for training, scoring and sampling.

    Attributes:
        antigen_tokenizer: of a pretrained encoder; None: the generator's own vocabulary.
        states: of antigens that a frozen encoder has read; None: the model reads them.
    """

    antigen_tokenizer: Any = None
    states: StatesOf | None = None
    encoder: PairEncoder = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = PairEncoder(self.antigen_tokenizer)

    @property
    def collator(self) -> AntibodyCollator:
        """A new one."""
        return AntibodyCollator(self.encoder.antigens.pad_token_id, self.states, self.antigen_tokenizer)

    def tokenize(self, rows: AntibodyRows, affinities: Sequence[float] | None = None) -> Dataset:
        """Tokenizes rows under the names of the model's arguments; `length` is tokens of antigen and antibody together.

        Raises:
            DataError: see `PairEncoder.encode_rows`.
        """
        columns = self.encoder.encode_rows(rows.antigens, rows.heavy, rows.light, affinities)
        antigens = [ids.astype(np.int16) for ids in columns["input_ids"]]
        pairs = [ids.astype(np.int16) for ids in columns["labels"]]
        return Dataset.from_dict(
            {
                "input_ids": antigens,
                "labels": pairs,
                "affinity": np.array(columns["affinity"], np.float32),
                "length": [len(antigen) + len(pair) for antigen, pair in zip(antigens, pairs)],
            }
        )


def fill_in_demo(args: GeneratorArguments, training: Any, explicit: frozenset[str]) -> Dataset:
    """Makes the arguments name the generated demo data and a small model, where the user said nothing; its table."""
    args.antigen_column = "antigen"
    args.heavy_column = "heavy"
    args.light_column = "light"
    if args.architecture == "lstm" and not {"size", "architecture", *DEMO_SHAPE} & explicit:
        vars(args).update(DEMO_SHAPE)
        vars(args).update({name: value for name, value in DEMO_SETTINGS.items() if name not in explicit})
        vars(training).update({name: value for name, value in DEMO_TRAINING.items() if name not in explicit})
    return make_demo_pairs()


def build_config(args: GeneratorArguments, training: Any, affinities: Sequence[float] | None = None) -> GeneratorConfig:
    """Builds the configuration of a generator of the stage's size; of a pretrained encoder its configuration is read.

    Args:
        args: after `resolve_stage`.
        training: with the LoRA options.
        affinities: of the training rows, whose scale the model takes; None: there are none.

    Raises:
        ArgumentError: see `GeneratorConfig`; an encoder that cannot be read; or `--use_peft`.
    """
    if training.use_peft:
        raise ArgumentError(
            "--use_peft: adapters of a generator stand in its antigen encoder. Give --architecture esm "
            "--encoder_training lora; --lora_r and the like say how."
        )
    settings: dict[str, Any] = {**args.shape, "dropout": args.dropout, "attend": args.attend}
    if affinities is not None:
        values = np.array(affinities, np.float64)
        settings |= {"label_mean": float(values.mean()), "label_std": float(values.std()) or 1.0}
        settings["unknown_affinity_dropout"] = args.unknown_affinity_dropout
    if args.architecture == "esm":
        lora = lora_settings(training)
        spec = read_encoder(str(args.antigen_encoder), args.antigen_encoder_revision, args.encoder_training, lora)
        settings |= {"antigen_encoder": asdict(spec), "save_full": args.save_full}
    return GeneratorConfig.of_size(args.architecture, str(args.size), **settings)


def build_model(args: GeneratorArguments, training: Any, data: PairData) -> AntibodyGenerator:
    """Builds a new generator of the stage's size, with the scale of the training rows' affinities.

    Args:
        args, training: as of `build_config`.
        data: of the stage.

    Raises:
        ArgumentError: as `build_config`; or an encoder that trains cannot be loaded.
    """
    config = build_config(args, training, data.affinities("train"))
    config.needs_light = data.needs_light
    return AntibodyGenerator.from_new_weights(config)


def build_inputs(model: AntibodyGenerator, training: Any, antigens: Sequence[str]) -> Inputs:
    """Builds tokenizers, and of a frozen encoder the states of `antigens`, each encoded once and kept in the cache.

    Args:
        antigens: of all splits, repeats allowed.

    Raises:
        ArgumentError, CacheError: no tokenizer beside the encoder; see `EmbeddingStore`.
        DataError: an antigen that the encoder cannot read.
    """
    if model.config.architecture != "esm":
        return Inputs()
    spec = model.encoder.spec
    tokenizer = load_tokenizer(spec.name_or_path, spec.revision)
    inputs = Inputs(tokenizer)
    inputs.encoder.antigens.max_residues = ResidueTokenizer(tokenizer, 1, limit_of_positions(spec.config)).max_residues
    if spec.training != "frozen":
        return inputs
    distinct = sorted(set(antigens))
    ids = inputs.encoder.encode_antigens(distinct)
    residues = inputs.encoder.antigens
    # The main process encodes, with the device that it trains on; the others wait, and read what it wrote.
    with training.main_process_first(desc="antigen states"):
        folder = os.path.expanduser(training.embedding_cache_dir)
        store = EmbeddingStore(folder, state_key(model.encoder, residues))
        fill_store(
            store,
            distinct,
            state_encoder(model.encoder, residues, training.device),
            tokens_per_batch=ENCODING_TOKENS,
            shard_sequences=SHARD_STATES,
            description="Encoding antigens",
            show_progress=not training.disable_tqdm and training.should_log,
        )
    inputs.states = StateTable(store, distinct, ids)
    model.encoder.release()
    return inputs
