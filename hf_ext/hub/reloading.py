"""Loads a downloaded model and compares its predictions with those of the model that was pushed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..models.affinity import AffinityModel
from ..models.quantization import quantized_layers
from .attempts import HubError

# Share of the predictions' spread that rounding may take. The same kernels in float32 give the same bits; faster
# kernels add in another order (1e-6 and below), and bfloat16 keeps 8 bits.
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05
# Adapters that trained beside 8 or 4 bits, on a base in float32: by how much the codes are off, and then some.
BITS_TOLERANCE = {8: 0.2, 4: 1.0}


def list_local_references(model: Any) -> list[str]:
    """Encoders or base models that a saved model names by a folder of this machine, which others do not have.

    "" stands for a base model that was made here and has no name.
    """
    if isinstance(model, PeftModel):
        name = _base_name(model)
        return [name] if not name or Path(name).exists() else []
    if not isinstance(model, AffinityModel) or model.config.save_full:
        return []
    names = [spec.name_or_path for spec in model.config.encoder_specs if spec.training != "full"]
    return [name for name in names if Path(name).is_dir()]


def can_reload(model: Any) -> bool:
    """Whether `reload_model` has a class and, for adapters, a base model to begin with."""
    return bool(_base_name(model)) if isinstance(model, PeftModel) else isinstance(model, PreTrainedModel)


def reload_model(model: Any, folder: Path) -> Any:
    """A new model of the class of `model`, from `folder`, in evaluation mode on the CPU.

    Raises:
        HubError: it does not load.

    Cost: memory for a second model, referenced encoders and base models included.
    """
    try:
        if isinstance(model, PeftModel):
            base: Any = type(model.get_base_model())
            return PeftModel.from_pretrained(base.from_pretrained(_base_name(model)), str(folder)).eval()
        return type(model).from_pretrained(folder).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise HubError(
            f"What was pushed came back whole but does not load: {type(error).__name__}: {error}. The model on this "
            f"disk is whole; load it with {type(model).__name__}.from_pretrained to see the same."
        ) from error


def reload_collator(collator: Any, folder: Path) -> Any:
    """The collator from `folder` where its class can be loaded, else `collator` itself."""
    loads = hasattr(collator, "save_pretrained") and hasattr(type(collator), "from_pretrained")
    return type(collator).from_pretrained(folder) if loads else collator


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises HubError if the tokenizer in `folder` has not the vocabulary of `tokenizer`. Of no tokenizer: nothing."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not (folder / "tokenizer_config.json").is_file():
        return
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if again.get_vocab() != tokenizer.get_vocab():
        raise HubError("The tokenizer on the Hub has another vocabulary than the one that the model was trained with.")


@dataclass(frozen=True)
class Comparison:
    """Predictions of two models for the same rows.

    Attributes:
        num_rows: compared.
        difference: largest absolute difference.
        spread: standard deviation of the live model's predictions.
    """

    num_rows: int
    difference: float
    spread: float

    def __str__(self) -> str:
        if self.difference == 0:
            return f"predictions for {self.num_rows} rows are the same bit for bit"
        return (
            f"predictions for {self.num_rows} rows differ by at most {self.difference:.2g} (spread {self.spread:.2g})"
        )


@torch.no_grad()
def compare_predictions(
    model: Any,
    batch: dict[str, Any],
    again: Any,
    batch_again: dict[str, Any],
    autocast: AbstractContextManager | None = None,
) -> Comparison:
    """Runs both models in evaluation mode and compares every number that both give for the rows.

    Args:
        model, again: the live model and the one from the Hub, on one device.
        batch, batch_again: the same rows, through each one's collator, on that device.
        autocast: half precision of the run, entered for both; None for none.

    Raises:
        HubError: the predictions differ by more than rounding: `TOLERANCE` of their spread, `HALF_TOLERANCE` where
            either computes in half precision, `BITS_TOLERANCE` where the live one alone has a base in bits.
    """
    was_training = model.training
    model.eval()
    with autocast or nullcontext():
        live, loaded = _numbers(model(**batch)), _numbers(again(**batch_again))
    model.train(was_training)
    names = [name for name in live if name in loaded and live[name].shape == loaded[name].shape]
    num_rows = max([len(live[name]) for name in names if live[name].ndim], default=0)
    if not num_rows:
        raise HubError(f"The model and the one from the Hub give no prediction of one form: {[*live]}, {[*loaded]}.")
    ours = torch.cat([live[name].flatten() for name in names])
    theirs = torch.cat([loaded[name].flatten() for name in names])
    difference = 0.0 if torch.equal(ours, theirs) else float((ours - theirs).abs().max())
    found = Comparison(num_rows, difference, float(ours.std()))
    share = _tolerance(model, again, autocast is not None)
    limit = share * (found.spread + 0.02 * float(ours.abs().max()))
    if not difference <= limit:  # NaN is not either
        raise HubError(
            f"The model on the Hub is not the one that was trained: {found}, allowed are {limit:.2g}. Its files came "
            "back as they were sent, so what `save_model` writes lacks something of this model."
        )
    return found


def _numbers(output: Any) -> dict[str, torch.Tensor]:
    items = output.items() if isinstance(output, Mapping) else {"output": output}.items()
    return {k: v.float() for k, v in items if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim}


def _tolerance(model: Any, again: Any, has_autocast: bool) -> float:
    bits = {layer.bits for layer in quantized_layers(model).values()}
    if bits and not quantized_layers(again):
        return BITS_TOLERANCE[min(bits)]
    return HALF_TOLERANCE if has_autocast or _is_half(model) or _is_half(again) else TOLERANCE


def _is_half(model: Any) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(p.dtype in halves for p in model.parameters()) or getattr(model, "encoder_autocast", None) is not None


def _base_name(model: PeftModel) -> str:
    config = model.peft_config[model.active_adapter]
    return str(config.base_model_name_or_path or "")
