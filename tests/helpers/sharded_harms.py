"""What can be wrong with a sharded checkpoint; where it is sound in itself, its manifest vouches for it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_ext.checkpoints.format.manifest import Manifest, hash_file


def vouch(folder: Path) -> None:
    """Makes the manifest say what the files are now."""
    manifest = Manifest.read(folder)
    dataclasses.replace(manifest, files={name: hash_file(folder / name) for name in manifest.files}).write(folder)


def shards(folder: Path, part: str = "sharded_weights") -> list[Path]:
    return sorted((folder / part).iterdir())


def swap(copies: list[Path]) -> None:
    """The parts of two processes stand in each other's place, as far as they are of one size."""
    paths = shards(copies[-1])[:2]
    one, other = map(load_file, paths)
    same = [name for name in one if name in other and one[name].shape == other[name].shape]
    assert same
    for path, own, others in ((paths[0], one, other), (paths[1], other, one)):
        with safe_open(path, "pt") as file:
            about = file.metadata()
        save_file({**own, **{name: others[name] for name in same}}, path, metadata=about)
    vouch(copies[-1])


def make_stale(copies: list[Path]) -> None:
    """The optimizer of the checkpoint before."""
    shutil.rmtree(copies[-1] / "sharded_optimizer")
    shutil.copytree(copies[0] / "sharded_optimizer", copies[-1] / "sharded_optimizer")
    vouch(copies[-1])


def drop_shard(copies: list[Path]) -> None:
    shards(copies[-1])[1].unlink()


def flip_bit(copies: list[Path]) -> None:
    path = shards(copies[-1], "sharded_optimizer")[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def forget_shard(copies: list[Path]) -> None:
    """The manifest does not know of the shard either, as if a disk had not shown it to the main process."""
    manifest = Manifest.read(copies[-1])
    path = shards(copies[-1])[1]
    files = {name: record for name, record in manifest.files.items() if name != f"sharded_weights/{path.name}"}
    path.unlink()
    dataclasses.replace(manifest, files=files).write(copies[-1])


HARMS: dict[str, Callable[[list[Path]], None]] = {
    "swap": swap,
    "stale": make_stale,
    "drop": drop_shard,
    "flip": flip_bit,
    "forget": forget_shard,
}
