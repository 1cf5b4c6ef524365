"""The model that a YAML file of `recipes/max_speed.py` describes, as a folder without weights."""

from __future__ import annotations

from pathlib import Path

from ..data.arguments import DataArguments
from ..models.affinity import AffinityModel
from ..models.configuration import build_config
from ..running import parse_command
from ..speedups.lora import lora_settings
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .building import build_collator, model_settings, read_towers, settle_training


def write_untrained_folder(config_file: Path, folder: Path) -> None:
    """Writes `config.json`, `inputs.json` and the tokenizers of the model that a run with `config_file` would train.

    For weights of other scripts, which `hf_ext.checkpoints.convert` brings into such a folder: they are
    then used with the pooling and the limits that the file says.

    Args:
        config_file: as for `--config`. Its data need not be there, its encoders must be.

    Raises:
        ArgumentError: as of a run with this file, before it reads rows.

    Cost: configuration and tokenizer of each encoder; weights of those that train are made, none are loaded.
    """
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    _, (args, data_args, training_args) = parse_command(types, {}, None, ["--config", str(config_file)])
    args.tower_training, _ = settle_training(args, training_args.use_peft)
    encoders, towers = read_towers(args, data_args.sequence_columns, lora_settings(training_args))
    model = AffinityModel(build_config(encoders, towers, **model_settings(args)))
    model.config.save_pretrained(str(folder))
    build_collator(model, data_args, args.max_length).save_pretrained(folder)
