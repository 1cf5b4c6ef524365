"""Writes the table of accelerate_configs/README.md from the files there; `--check` only says whether it is current.

python benchmarks/config_table.py
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import scaling
import yaml

from hf_ext.reporting.tables import format_markdown_table

FOLDER = Path(__file__).resolve().parent.parent / "accelerate_configs"
_BLOCK = re.compile(r"(<!-- table: configs -->\n).*?(<!-- end -->)", re.DOTALL)

USABLE = 0.7  # of a card's memory; the rest is left to activations (assumed)


@dataclass(frozen=True)
class Encoder:
    """An ESM-2 of the Hub, by its shape."""

    name: str
    num_layers: int
    width: int
    num_heads: int

    @property
    def num_parameters(self) -> int:
        """With the masked-LM head, whose output is tied to the embeddings, and the contact head."""
        layers = self.num_layers * (12 * self.width**2 + 13 * self.width)
        head = self.width**2 + 3 * self.width + 33
        return layers + 33 * self.width + 2 * self.width + head + self.num_layers * self.num_heads + 1


ENCODERS = [
    Encoder("8M", 6, 320, 20),
    Encoder("35M", 12, 480, 20),
    Encoder("150M", 30, 640, 20),
    Encoder("650M", 33, 1280, 20),
    Encoder("3B", 36, 2560, 40),
    Encoder("15B", 48, 5120, 40),
]
MIDDLE, LARGE = ENCODERS[3], ENCODERS[4]


@dataclass(frozen=True)
class Config:
    """What the table says of a launcher file. `group` is the number of processes that split one copy of the model."""

    name: str
    strategy: str
    num_processes: int
    group: int
    half: bool
    offload: bool
    lora: bool
    hardware: str
    purpose: str
    card_gb: int | None


def read_config(path: Path) -> Config:
    """Settings from the keys, hardware and purpose from the comment at the top."""
    text = path.read_text(encoding="ascii")
    keys = yaml.safe_load(text)
    fsdp, zero = keys.get("fsdp_config", {}), keys.get("deepspeed_config", {})
    processes = keys["num_processes"]
    kinds = {"NO": "one process", "MULTI_GPU": "DDP", "FSDP": "FSDP2", "DEEPSPEED": f"ZeRO-{zero.get('zero_stage')}"}
    group = keys.get("parallelism_config", {}).get("parallelism_config_dp_shard_size", processes)
    hardware = _sentence(text, "Smallest hardware: ")
    memory = re.search(r"(\d+) GB", hardware)
    return Config(
        name=path.name,
        strategy="HSDP" if group < processes else kinds[keys["distributed_type"]],
        num_processes=processes,
        group=group,
        half=keys["mixed_precision"] != "no",
        offload=bool(fsdp.get("fsdp_offload_params") or zero.get("offload_param_device")),
        lora=path.stem.endswith("_lora"),
        hardware=hardware.partition(";")[0],
        purpose=_sentence(text, "Take it for: "),
        card_gb=int(memory[1]) if memory and not keys.get("use_cpu") else None,
    )


def _sentence(text: str, start: str) -> str:
    head = re.sub(r"\n#\s*", " ", text.partition("\n\n")[0])
    return re.split(r"\.(?:\s|$)", head.partition(start)[2])[0]


def _layout(config: Config, half: bool) -> scaling.Layout:
    return scaling.Layout(config.strategy, config.num_processes, config.group, half, config.offload)


def _shape(config: Config, encoder: Encoder) -> scaling.Shape:
    """All of it trains, or, under LoRA, next to nothing."""
    total = encoder.num_parameters
    return scaling.Shape(total, 0 if config.lora else total, encoder.num_layers)


def device_bytes(config: Config, encoder: Encoder, half: bool) -> float:
    """Weights, gradients and optimizer states of one process; activations come on top."""
    return scaling.state_bytes(_layout(config, half), _shape(config, encoder))


def host_bytes(config: Config, encoder: Encoder) -> float:
    """Host memory that offloading takes on one machine; 0 without."""
    return scaling.host_bytes(_layout(config, config.half), _shape(config, encoder))


def sent(config: Config, encoder: Encoder) -> list[tuple[float, str, float]]:
    """What one process sends in a step of one micro-batch: factor, what it multiplies, bytes."""
    total, factors = encoder.num_parameters, dict[float, float]()
    for part in scaling.transfers(_layout(config, config.half), _shape(config, encoder)):
        if part.num_bytes:
            factors[part.num_bytes] = factors.get(part.num_bytes, 0.0) + part.factor
    return [(factor, _per_parameter(size / total, config), factor * size) for size, factor in factors.items()]


def _per_parameter(width: float, config: Config) -> str:
    return f"{width:g} P" if width in (2, 4) else f"{width * config.group:g} P / {config.group}"


def largest_that_fits(config: Config) -> str:
    """The largest ESM-2 whose states leave room for activations on the smallest card, at the file's own precision."""
    if config.card_gb is None:
        return "-"
    room = USABLE * config.card_gb * 1e9
    fitting = [encoder.name for encoder in ENCODERS if device_bytes(config, encoder, config.half) <= room]
    return fitting[-1] + (" (LoRA)" if config.lora else "")


SPLIT = {
    "one process": "nothing",
    "DDP": "rows only",
    "FSDP2": "weights, gradients, states",
    "HSDP": "weights, gradients, states, within a group",
    "ZeRO-2": "gradients, states",
    "ZeRO-3": "weights, gradients, states",
}


def _memory(config: Config, encoder: Encoder) -> str:
    numbers = " / ".join(f"{device_bytes(config, encoder, half) / 1e9:.1f}" for half in (True, False))
    host = host_bytes(config, encoder)
    return f"{numbers}, host {host / 1e9:.0f}" if host else numbers


def _row(config: Config) -> list[str]:
    parts = sent(config, MIDDLE)
    formula = " + ".join(f"{factor:.3g} x {what}" for factor, what, _ in parts)
    return [
        f"[`{config.name}`]({config.name})",
        config.hardware,
        config.strategy + (" + host memory" if config.offload else ""),
        SPLIT[config.strategy],
        largest_that_fits(config),
        _memory(config, MIDDLE),
        _memory(config, LARGE),
        f"{formula} = {sum(part[2] for part in parts) / 1e9:.1f} GB" if parts else "-",
        config.purpose,
    ]


HEADERS = [
    "file",
    "smallest hardware",
    "strategy",
    "split over processes",
    "fits there, full AdamW",
    "650M, GB per process: half / fp32",
    "3B, GB per process: half / fp32",
    "sent per process and step, 650M",
    "take it for",
]


def table() -> str:
    """One row per file: the CPU first, then by number of processes."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: path.name)
    configs = sorted(
        map(read_config, paths), key=lambda config: ("cpu" not in config.name, config.num_processes, config.name)
    )
    return format_markdown_table([_row(config) for config in configs], HEADERS)


def render(text: str) -> str:
    """`text` with the table filled in."""
    return _BLOCK.sub(lambda block: f"{block[1]}{table()}\n{block[2]}", text)


def main() -> None:
    """Rewrites the README of the folder, or exits with 1 if `--check` finds it out of date."""
    path = FOLDER / "README.md"
    text = path.read_text(encoding="ascii")
    if "--check" in sys.argv:
        sys.exit(0 if render(text) == text else f"{path} is not what benchmarks/config_table.py writes: run it.")
    path.write_text(render(text), encoding="ascii")


if __name__ == "__main__":
    main()
