"""What rounding leaves of pretrained encoders' embeddings: bfloat16, and products of 8-bit integers in three ways.

    python benchmarks/int8_noise.py gb1=gb1.csv.gz:sequence:ESM2_FOLDER her2=her2.csv.gz:heavy:FOLDER ...
        [--esm_cpp PYTHON]

Of each set 32 distinct sequences, spread over its training rows, as the probe of `encoder_precision` draws them; noise
is its number, the distance from float32 as a share of the spread between sequences. 8 bits have a scale for each output
and each token; "smoothed" first moves large columns into the weights, by the amplitudes of the same sequences
(SmoothQuant, arXiv:2211.10438, alpha 0.5), which flatters it. They are simulated: values are rounded, products are of
float32. esm-cpp's are its own, of ESM-2 alone, beside its own float32. Writes `results/int8_noise.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from cpu_encoding import save_for_esm_cpp
from torch import nn
from transformers import AutoModel, AutoTokenizer, EsmForMaskedLM
from transformers.utils import logging

from hf_ext.speedups.encoder_precision import MAX_NOISE, PROBE_SEQUENCES, relative_noise

RESULT = Path(__file__).resolve().parent / "results" / "int8_noise.json"
LEAST = 1e-6
ESM_CPP = """
import json
import esm_cpp, numpy
rows = [numpy.asarray(row, dtype=numpy.int32) for row in json.load(open("rows.json"))]
exact, coded = (esm_cpp.Model.load_from_safetensors("weights.safetensors") for _ in range(2))
coded.quantize_weights()
means = [[model.forward_with_hidden_states(row)[1][-1].mean(0).tolist() for row in rows] for model in (exact, coded)]
print(json.dumps(means))
"""


def round_to_int8(values: torch.Tensor) -> torch.Tensor:
    """In 255 steps for each last dimension."""
    step = values.abs().amax(-1, keepdim=True).clamp(min=LEAST) / 127
    return (values / step).round() * step


class Int8Linear(nn.Module):
    """A linear layer whose weights and inputs are rounded, inputs by `smooth` (k,) smaller and weights larger."""

    def __init__(self, layer: nn.Linear, smooth: torch.Tensor):
        super().__init__()
        self.smooth, self.weight, self.bias = smooth, round_to_int8(layer.weight.detach() * smooth), layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(round_to_int8(inputs / self.smooth), self.weight, self.bias)


def blocks_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of transformer blocks, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layer." in n}


def in_int8(model: nn.Module, smooth: Callable[[str, nn.Linear], torch.Tensor]) -> nn.Module:
    """A copy whose blocks compute in 8 bits."""
    made = copy.deepcopy(model)
    for name, layer in blocks_of(made).items():
        made.set_submodule(name, Int8Linear(layer, smooth(name, layer)))
    return made


@torch.no_grad()
def embed(model: nn.Module, rows: list[list[int]], half: bool = False) -> torch.Tensor:
    """Mean last state of each row, (n, width)."""
    with torch.autocast("cpu", torch.bfloat16, half):
        return torch.stack([model(torch.tensor([row])).last_hidden_state.float().mean(1)[0] for row in rows])


def amplitudes(model: nn.Module, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Largest absolute input of each column, by layer."""
    found: dict[str, list[torch.Tensor]] = {}
    watched = copy.deepcopy(model)
    for name, layer in blocks_of(watched).items():
        seen = found.setdefault(name, [])
        layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].abs().flatten(0, -2).amax(0)))
    embed(watched, rows)
    return {name: torch.stack(seen).amax(0).clamp(min=LEAST) for name, seen in found.items()}


def run_esm_cpp(python: str, folder: str, rows: list[list[int]]) -> dict[str, Any]:
    """Of how many rows esm-cpp's float32 and 8 bits are NaN, and the noise of the latter where no row is."""
    model = EsmForMaskedLM.from_pretrained(folder)  # with a new head where the folder has none
    with tempfile.TemporaryDirectory() as work:
        save_for_esm_cpp(model, rows, Path(work))
        run = subprocess.run([python, "-c", ESM_CPP], cwd=work, capture_output=True, text=True, check=True)
    exact, coded = (torch.tensor(means) for means in json.loads(run.stdout.splitlines()[-1]))
    num_nan = [int(means.isnan().any(1).sum()) for means in (exact, coded)]
    return {"nan": num_nan, "noise_share": None if any(num_nan) else round(relative_noise(coded, exact), 4)}


def measure(name: str, file: str, column: str, folder: str, python: str | None) -> dict[str, Any]:
    """The noise of one set."""
    table = pd.read_csv(file)
    rows = table[table["split"] == "train"] if "split" in table else table
    sequences = [*dict.fromkeys(rows[column])]
    sequences = sequences[:: max(1, len(sequences) // PROBE_SEQUENCES)][:PROBE_SEQUENCES]
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    is_esm = model.config.model_type == "esm"
    tokens = [tokenizer(text if is_esm else " ".join(text))["input_ids"] for text in sequences]
    exact, large = embed(model, tokens), amplitudes(model, tokens)
    plain = in_int8(model, lambda _, layer: torch.ones(layer.in_features))
    smoothed = in_int8(
        model, lambda name, layer: (large[name] / layer.weight.detach().abs().amax(0).clamp(min=LEAST)).sqrt()
    )
    found = {
        "bfloat16": relative_noise(embed(model, tokens, half=True), exact),
        "int8": relative_noise(embed(plain, tokens), exact),
        "int8, smoothed": relative_noise(embed(smoothed, tokens), exact),
    }
    noise = {side: round(share, 4) for side, share in found.items()}
    row = {"data": name, "encoder": Path(folder).name, "sequences": len(sequences), "noise_share": noise}
    return row | ({"esm_cpp": run_esm_cpp(python, folder, tokens)} if python and is_esm else {})


def main() -> None:
    """Measures all sets, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE:COLUMN:ENCODER")
    parser.add_argument("--esm_cpp", help="a Python with esm-cpp")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    logging.set_verbosity_error()
    rows = []
    for words in given.sets:
        name, _, rest = words.partition("=")
        rows.append(measure(name, *rest.split(":"), given.esm_cpp))
        print(json.dumps(rows[-1]), flush=True)
    given.output.write_text(json.dumps({"bound": MAX_NOISE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
