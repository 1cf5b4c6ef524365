"""What may stand in the folder of a run before it begins: nothing that it would write through, break on or destroy."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ...errors import FolderError
from .finished_model import CONFIG, MODEL_MANIFEST, TOKENIZER, WEIGHTS
from .run_signs import is_of_a_run

# What a run or its model consists of in the output folder: files that are opened there, or replaced.
_MODEL = rf"{WEIGHTS}|{CONFIG}|{TOKENIZER}|{re.escape(MODEL_MANIFEST)}"
_GENERATION = r"gates\.json|generated\.csv|epoch_samples\.jsonl"
_RESULTS = rf"{_GENERATION}|predictions\.csv|rejected_rows\.csv|report\.(html|md)|(loss|scatter)\.png|finished\.json"
_RECORDS = r"plan\.json|all_results\.json|trainer_state\.json|training_args\.(json|bin)|throughput\.json"
_TRACE = r"profile_trace\.json\.gz"
_REPLACED = re.compile(rf"{_MODEL}|{_RESULTS}|{_RECORDS}|{_TRACE}|teacher_predictions\.safetensors")
_KEPT = re.compile(r"run\.log|README(\.hf_ext)?\.md")  # added to, or somebody's own
_DRAFT = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.tmp")
_MODELS = re.compile(r"merged|seed-\d+")  # models of their own, with signs of their own
_FOLDERS = re.compile(rf"{_MODELS.pattern}|(({_MODELS.pattern})/)?tokenizers(/\d+)?|demo_encoders(/(bert|esm))?")


def check_content(folder: Path, subfolders: Collection[str] = ()) -> None:
    """Refuses a folder in which a run would write through links, fail at its end, or overwrite what is not a run's.

    `README.md` and `run.log` count only if they are links: the one stays, the other is added to.

    Args:
        folder: of the run.
        subfolders: those of `demo_encoders`, `merged` and `seed-<number>` that this command writes to; `tokenizers` is
            always looked at.

    Raises:
        FolderError: with the names.
        OSError: the folder, or one below, cannot be read.
    """
    written = dict(_list_written(folder, subfolders))
    unfit = [text for name, status in sorted(written.items()) if (text := _unfitness(folder, name, status))]
    if unfit:
        raise FolderError(
            f"{folder}: a run writes files of these names: {'; '.join(unfit)}. Move them away, or choose another "
            "--output_dir. Nothing was touched."
        )
    _refuse_others(folder, (name for name in written if not _MODELS.match(name)))
    for below in sorted(filter(_MODELS.fullmatch, written)):
        start = f"{below}/"
        _refuse_others(folder / below, (name.removeprefix(start) for name in written if name.startswith(start)))


def list_files(folder: Path) -> list[Path]:
    """The regular files in `folder`, and in all folders below that a run may write to, of names that a run writes.

    Raises:
        OSError: the folder, or one below, cannot be read.
    """
    written = _list_written(folder, os.listdir(folder))
    return [folder / name for name, status in written if stat.S_ISREG(status.st_mode)]


def _refuse_others(folder: Path, names: Iterator[str]) -> None:
    replaced = sorted(name for name in names if _REPLACED.fullmatch(name.rpartition("/")[2]))
    if replaced and not is_of_a_run(folder):
        raise FolderError(
            f"{folder} holds {', '.join(replaced)}, which a run would overwrite, and nothing that a run of ours wrote "
            "beside (its run.log, plan.json, all_results.json, model_manifest.json, checkpoints). Choose another "
            "--output_dir, or move them away. Nothing was touched."
        )


def _list_written(folder: Path, subfolders: Collection[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Files and folders of names that a run writes: path below `folder`, and status. No link is followed."""
    below = [""]
    for place in below:  # grows meanwhile
        for entry in os.scandir(folder / place):
            name = f"{place}/{entry.name}" if place else entry.name
            if _FOLDERS.fullmatch(name) and name.split("/")[0] in {"tokenizers", *subfolders}:
                below += [name] if entry.is_dir(follow_symlinks=False) else []
            elif not (_REPLACED.fullmatch(_final_name(entry.name)) or _KEPT.fullmatch(_final_name(entry.name))):
                continue
            yield name, entry.stat(follow_symlinks=False)


def _final_name(name: str) -> str:
    draft = _DRAFT.fullmatch(name)
    return draft["name"] if draft else name


def _unfitness(folder: Path, name: str, status: os.stat_result) -> str | None:
    path, is_folder = folder / name, stat.S_ISDIR(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return f"{name} is a link to {os.readlink(path)}"
    if _FOLDERS.fullmatch(name):
        return None if is_folder else f"{name} is no folder"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is {'a folder' if is_folder else 'no regular file'}"
    may_write = os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return None if may_write else f"{name} cannot be written to"
