"""Loading encoders, telling their family, naming what identifies their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, extract_commit_hash, logging

from ..data import irregular_kind, make_esm_tokenizer
from ..errors import ArgumentError
from ..optional import require
from ..pretrained import check_folder, reading
from ..processes import whole_weights
from .configuration import VECTORS, EncoderSpec, Training
from .families import FAMILIES, check_family
from .head import join_layers
from .lora import LoraSettings, add_adapters

_NOT_NEEDED = ("contact_head.", "pooler.")  # never used for embeddings
# ESM's contact head never sees a gradient; left trainable it breaks DDP and optimizer resume. RoFormer's table of sines
# is a weight by name alone.
_NEVER_TRAINED = ("contact_head.", "encoder.embed_positions.")
WITH_HEAD = (
    "Take one that was saved with its masked head, such as facebook/esm2_t12_35M_UR50D, or what hf-ext mlm wrote."
)


class NoMaskedHeadError(ArgumentError):
    """An encoder does not say how likely a residue is: its kind has no masked head, or its weights lack it."""


def read_encoder(
    name_or_path: str,
    revision: str | None,
    training: Training,
    lora: LoraSettings,
    layer: int | None = None,
    masked_head: bool = False,
) -> EncoderSpec:
    """Reads an encoder's configuration and identity; downloads no weights.

    Args:
        layer: the number, from 1, of the layer whose states are read; None: the last.
        masked_head: whether its head of a masked language model is needed.

    Raises:
        NoMaskedHeadError: it is, and this kind has none; where its weights lack it, `load_encoder` says so.
        ArgumentError: no configuration there, or of what cannot be built here; another family; it has no such layer.
    """
    hint = check_folder(name_or_path, "Encoder")
    remedy = "Give a Hub id, such as facebook/esm2_t33_650M_UR50D, or a folder with config.json and model.safetensors."
    what = "no such folder here, nor such a model on the Hub" if hint else "no model configuration found"
    with reading(f"Encoder {name_or_path!r}: {what}", name_or_path, f"{hint} {remedy}".lstrip()):
        config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    check_family(name_or_path, config.to_dict())
    if masked_head and (kind := config.model_type) not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise NoMaskedHeadError(f"Encoder {name_or_path!r}: type {kind!r} has no masked head. {WITH_HEAD}")
    num_layers = config.num_hidden_layers
    if layer is not None and layer > num_layers:
        raise ArgumentError(f"--layer {layer}: {name_or_path!r} has {num_layers} layers, numbered from 1.")
    commit = find_commit(name_or_path, revision)
    spec = EncoderSpec(
        name_or_path=str(Path(name_or_path).resolve() if Path(name_or_path).is_dir() else name_or_path),
        config=config.to_dict(),
        revision=revision or commit,
        fingerprint=fingerprint_weights(name_or_path, commit),
        training=training,
        lora=vars(lora) if training == "lora" else {},
        layer=None if layer == num_layers else layer,
        masked_head=masked_head,
    )
    with reading(f"Encoder {name_or_path!r} cannot be built", name_or_path, remedy), torch.device("meta"):
        _architecture(spec)  # no memory, no numbers: says now what would else end the run after the data was read
    return spec


def find_commit(name_or_path: str, revision: str | None) -> str | None:
    """Finds the commit that a Hub id and a branch, tag or nothing stand for, once its configuration is in the cache.

    transformers 5 does not keep it in the configuration any more. None for a folder, and where the cache has no commit.
    """
    if Path(name_or_path).is_dir():
        return None
    file = try_to_load_from_cache(name_or_path, CONFIG_NAME, revision=revision)
    return extract_commit_hash(file, None) if isinstance(file, str) else None


def fingerprint_weights(name_or_path: str, commit: str | None) -> str:
    """Identifies an encoder's weights: the Hub commit, or sha256 over a local folder's weights and configuration.

    Cost: reads a local folder's weight files once, about 1 s per GB.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        return f"commit:{commit}"
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"), folder / "config.json"]):
        if kind := irregular_kind(path):
            raise ArgumentError(f"{path}: is {kind}, not a regular file. Copy the encoder, or download it, again.")
        digest.update(path.name.encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return f"sha256:{digest.hexdigest()}"


def identify_encoder(spec: EncoderSpec) -> str:
    """Returns what an encoder's embeddings depend on: hash of its weights, or Hub id and commit; and the layer read.

    A branch or tag says it only where no commit is known.
    """
    fingerprint = str(spec.fingerprint or "")
    is_hash = fingerprint.startswith("sha256:")
    weights = fingerprint if is_hash else f"{spec.name_or_path}@{_commit(spec) or spec.revision}"
    weights += f", layers {spec.also} and" if spec.also else ""
    return weights if spec.layer is None else f"{weights}, layer {spec.layer}"


def _commit(spec: EncoderSpec) -> str | None:
    """Returns the Hub commit whose configuration the spec was read from, if it is known."""
    kind, _, commit = str(spec.fingerprint or "").partition(":")
    return commit if kind == "commit" and commit not in ("", "None") else None


def load_encoder(
    spec: EncoderSpec,
    dtype: torch.dtype = torch.float32,
    bits: int | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Loads pretrained weights, without pooling layers or decoders, and adapts them for LoRA where the spec says so.

    Args:
        dtype: of the weights.
        bits: 8 or 4 for linear layers in as many bits (LLM.int8, arXiv:2208.07339, and nf4, arXiv:2305.14314).
        device: where these are to be; other weights come to the CPU.

    Raises:
        ArgumentError: not found, damaged, or not the weights whose fingerprint the spec carries, or some are missing;
            there is none, since vectors are read.
        MissingDependencyError: bits without a bitsandbytes that works here.
    """
    if spec.config["model_type"] == VECTORS:
        raise ArgumentError(
            f"This model has no encoder: it reads vectors of {spec.config['hidden_size']:,} numbers that another "
            "program made. Give --embeddings FILE with those of these rows, from where the vectors of training were."
        )
    if spec.fingerprint and Path(spec.name_or_path).is_dir():
        found = fingerprint_weights(spec.name_or_path, None)
        if found != spec.fingerprint:
            raise ArgumentError(
                f"Encoder {spec.name_or_path!r} has changed: its weights hash to {found}, this model was made with "
                f"{spec.fingerprint}. Restore the folder, or train again."
            )
    factory = _factory(spec)
    # A branch may have moved since the spec was read: its commit is loaded, not what the branch is by now.
    revision = _commit(spec) or spec.revision
    settings = {"revision": revision, "dtype": dtype, "trust_remote_code": False, **_no_pooler(spec)}
    if bits is not None:
        settings |= {"quantization_config": _quantization(bits, dtype), "device_map": {"": device}}
    remedy = "Copy it, or download it, again."
    if not Path(spec.name_or_path).is_dir():  # a folder that is here is as it was when it was named, see above
        remedy = "Restore it. (Frozen encoders are saved by reference; --save_full keeps a copy in the model folder.)"
    with (
        reading(f"Encoder {spec.name_or_path!r} cannot be loaded", spec.name_or_path, remedy),
        _without_load_report(),
        whole_weights(),
    ):
        encoder, info = factory.from_pretrained(spec.name_or_path, output_loading_info=True, **settings)
    missing = sorted(key for key in info["missing_keys"] if not any(map(key.__contains__, _NOT_NEEDED)))
    if missing:
        told = f"Encoder {spec.name_or_path!r} lacks weights: {missing[:5]} ({len(missing)} in all)."
        raise NoMaskedHeadError(f"{told} {WITH_HEAD}") if spec.masked_head else ArgumentError(told)
    for module in encoder.modules() if bits == 4 else ():
        module.support_avx512bf16_for_cpu = False  # else repacked in evaluation, and computed in bf16
    return prepare_encoder(encoder, spec)


def _quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Quantizes all linear layers but ESM's contact head, and T5's `wo`, to whose dtype T5 casts its states."""
    require("bitsandbytes.nn", "quantization", "weights in 8 or 4 bits (--load_in_8bit, --load_in_4bit)")
    return BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        llm_int8_threshold=0.0,
        llm_int8_skip_modules=["contact_head", "wo"],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silences transformers' list of weights that an encoder without its pretraining head does not use."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def build_encoder(spec: EncoderSpec) -> PreTrainedModel:
    """Builds the encoder's architecture with weights yet to be loaded, in torch's default dtype."""
    return prepare_encoder(_architecture(spec), spec)


def _architecture(spec: EncoderSpec) -> PreTrainedModel:
    settings = dict(spec.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    factory = _factory(spec)
    # Left to itself, from_config takes the dtype that the encoder was published in, such as float16.
    with whole_weights():
        return factory.from_config(config, dtype=torch.get_default_dtype(), **_no_pooler(spec))


def _factory(spec: EncoderSpec) -> Any:
    if spec.masked_head:
        return AutoModelForMaskedLM
    family = FAMILIES.get(spec.config["model_type"])
    return AutoModelForTextEncoding if family and family.reads_text else AutoModel


def prepare_encoder(encoder: PreTrainedModel, spec: EncoderSpec) -> PreTrainedModel:
    """Drops the layers above the one that is read, adds adapters and freezes what does not train, as `spec` says."""
    if spec.layer is not None:
        cut_layers(encoder, spec.layer)
    if spec.also:
        join_layers(layers_of(encoder), final_norm_of(encoder), spec.also)
    if spec.training == "lora":
        add_adapters(encoder, LoraSettings(**spec.lora))
    set_trainable(encoder, spec.training)
    return encoder


def layers_of(encoder: PreTrainedModel) -> nn.ModuleList:
    """Returns the layers of an encoder, in their order."""
    layers = encoder.get_submodule(FAMILIES[encoder.config.model_type].layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def cut_layers(encoder: PreTrainedModel, number: int) -> None:
    """Drops the layers above `number`, counted from 1, whose states then pass through the final norm."""
    del layers_of(encoder)[number:]
    encoder.config.num_hidden_layers = number


def final_norm_of(encoder: PreTrainedModel) -> nn.Module:
    """Returns what the states of an encoder's last layer pass through."""
    name = FAMILIES[encoder.config.model_type].final_norm
    return nn.Identity() if name is None else encoder.get_submodule(name)


def set_trainable(encoder: PreTrainedModel, training: Training) -> None:
    """Lets all weights train ("full"), the adapters only ("lora") or none ("frozen")."""
    for name, parameter in encoder.named_parameters():
        trains = not any(map(name.__contains__, _NEVER_TRAINED)) if training == "full" else "lora_" in name
        parameter.requires_grad_(trains)


def load_tokenizer(name_or_path: str, revision: str | None = None) -> Any:
    """Loads the encoder's own tokenizer; for vectors ESM-2's, which knows what a residue is.

    Raises:
        ArgumentError: none there, damaged, or one that needs code of its own.
    """
    if name_or_path == VECTORS:
        return make_esm_tokenizer()
    remedy = "Give a Hub id or a folder with the files that the tokenizer's save_pretrained wrote."
    with reading(f"{name_or_path!r}: no tokenizer there", name_or_path, remedy):
        return AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)


def _no_pooler(spec: EncoderSpec) -> dict[str, Any]:
    if spec.config["model_type"] in ("esm", "bert") and not spec.masked_head:
        return {"add_pooling_layer": False}
    return {}
