"""A manifest reads back as it was written, or not at all; and it finds every damaged file."""

import hashlib
import json
import os

import pytest

from hf_ext.checkpoints.manifest import MANIFEST, FileRecord, Manifest, hash_file
from hf_ext.errors import CheckpointError

FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}\n", "sub/é 1.json": b"[1, 2]"}


def write_checkpoint(folder, step=20) -> Manifest:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    facts = {"learning_rate": 1e-5, "nan": [None, True, -0.0], "bins": {2: "a", 10: "b"}}
    manifest = Manifest("run", step, 1.25, facts, {name: hash_file(folder / name) for name in FILES})
    manifest.write(folder)
    return manifest


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path):
    write_checkpoint(tmp_path)
    path = tmp_path / MANIFEST
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            Manifest.read(tmp_path)
    path.write_bytes(sound)
    Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.unlink(), "found nothing"),
        (lambda path: path.write_bytes(b""), "expected JSON"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "found others"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected JSON"),
        (lambda path: path.write_bytes(bytes(512)), "expected JSON"),
        (lambda path: path.write_text("[" * 100_000), "expected JSON"),
        (lambda path: path.write_text("[]"), "expected a JSON object, found a list"),
        (lambda path: path.write_text('{"version": 3}'), "fields of a manifest"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 20', b'"step": 21')), "found others"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2')), "Update hf_ext"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"format": 1,\n', b"")), "found others"),
        (lambda path: (path.rename(path.parent / "m"), path.symlink_to(path.parent / "m")), "found a symlink"),
        (lambda path: (path.unlink(), path.mkdir()), "found a folder, pipe or device"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "found a folder, pipe or device"),  # which would be waited for
    ],
)
def test_a_damaged_manifest_is_refused_with_what_is_wrong(tmp_path, damage, found):
    write_checkpoint(tmp_path)
    damage(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match=found):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model", "/etc/passwd", "a/../../b", "", ".", "a//b", "./a", "a\\..\\b", "a\0", "a/"]
)
def test_names_that_may_leave_the_folder_are_refused_in_writing_and_in_reading(tmp_path, name):
    record = FileRecord(1, "0" * 64)
    with pytest.raises(CheckpointError, match="plain path"):
        Manifest("run", 1, 0.0, {}, {name: record})
    forge(tmp_path, files={name: {"size": 1, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match="plain path"):
        Manifest.read(tmp_path)


def forge(folder, **changes) -> None:
    """Writes a manifest whose own hash is right, as a person would who means harm."""
    body = {"format": 1, "run_id": "run", "step": 1, "epoch": 0.5, "facts": {}, "files": {}, **changes}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n")
