"""The runs of one command, each in a folder of its own: which there are, which are finished, and one after the other.

All that is fitted sees the splits of one fold alone, since each is a whole run. Embeddings of frozen encoders are kept
by content, so that later runs find them. Killed, the same command makes what is left.
"""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints import FREE_TO_DIFFER, MODEL_MANIFEST, check_model
from ...data import REJECTED_FILE, SOURCE_ROW, DataArguments, Fold, find_folds, find_whole, fingerprint, load_sequences
from ...errors import ArgumentError, DataError
from ...evaluation import describe_failed, raise_failed
from ...files import Json
from ...hub import open_repository, push_folder
from ...processes import do_on_main
from ...reporting import read_object
from ...tasks import Run, Task
from ...text import start_run_log, write_json
from ...training_args import FastTrainingArguments
from ..arguments import AffinityArguments
from ..scoring import read_requirements
from .pooling import Part, conclude

STATE = "repeats.json"  # arguments, rows, and which runs are finished
# Beginnings of reasons why an argument may differ from run to run, that hold for one that is finished, too.
FREE = ("a place", "shown", "says what is kept", "is about one", "the machine", "computes the same")
GROWS = ("num_seeds", "final_model", "require", "config")
MAX_NAME = 60
MAX_LISTED = 5


def is_repeated(args: AffinityArguments, data_args: DataArguments) -> bool:
    """Returns whether arguments ask for several runs, of which this is none."""
    return args.num_seeds > 1 or (args.folds is not None and data_args.fold is None)


def check(args: AffinityArguments, data_args: DataArguments, training: FastTrainingArguments) -> None:
    """Raises ArgumentError where several runs are asked for beside what goes with one alone."""
    told = f"--folds {args.folds}" if args.folds else f"--num_seeds {args.num_seeds}"
    if args.final_model != "mean" and not args.folds:
        raise ArgumentError(f"--final_model {args.final_model} is for --folds: give it, or leave this out.")
    if not is_repeated(args, data_args):
        return
    wrong = {
        "--streaming, whose rows cannot be divided": data_args.streaming,
        "--stock_trainer, which leaves no models to join": args.stock_trainer,
        "--loss ranking, whose models have no common unit": args.loss == "ranking",
        "a checkpoint, which is of one run (give --resume auto or no)": training.resume not in ("auto", "no")
        or training.resume_from_checkpoint,
    }
    if args.folds:
        wrong |= {
            "--split_column, which names the test rows itself": data_args.split_column,
            "--init_head_from, whose head has seen rows that are tested": args.init_head_from,
            "--distill_from, whose teacher has seen rows that are tested": args.distill_from,
            "generated rows (name a --dataset_name)": data_args.dataset_name is None,
        }
    if found := [text for text, is_asked in wrong.items() if is_asked]:
        raise ArgumentError(f"{told} does not go with {'; nor with '.join(found)}.")


def refuse_alone(run: Run) -> None:
    """Raises ArgumentError where a script makes one run of several, or a single run goes into the folder of several."""
    if is_repeated(run.model_args, run.data_args):
        raise ArgumentError(
            "--folds and --num_seeds make several runs, and this script makes one: use `hf-ext train`, or on several "
            "processes `accelerate launch -m hf_ext train`. In a script of yours, call `task.take_steps(run)`."
        )
    if (run.folder / STATE).is_file():
        raise ArgumentError(f"{run.folder} holds the runs of --folds or --num_seeds. Choose another --output_dir.")


def find_folds_of(folds: str, data_args: DataArguments, rejected: Path | None = None) -> tuple[list[str], Any, Any]:
    """Finds the folds of the rows, in order; returns them with the rows and the kind of their labels.

    Raises:
        ArgumentError, DataError: as `load_sequences` and `find_folds`; rows of several files.
    """
    data_args = copy.copy(data_args)
    data_args.fold = Fold(folds)
    loaded = load_sequences(data_args, rejected=rejected, needs_labels=True)
    table: Any = loaded.table
    if len(table.unique(SOURCE_ROW)) < len(table):
        raise DataError(f"--folds {folds}: {data_args.dataset_name} is several files. Join them in one.")
    values = np.unique(find_folds(table, data_args, find_whole(table, data_args))).tolist()
    values.sort(key=lambda value: (float(value) if value.isdecimal() else np.inf, value))
    return values, table, loaded.kind


def plan_parts(run: Run) -> tuple[list[Part], Json]:
    """Plans all runs, those of a fold together; returns them with what tells the rows of folds from others."""
    args = run.model_args
    folds: dict[str, Fold | None] = {"": None}
    content: Json = {}
    if args.folds:
        values, table, kind = find_folds_of(args.folds, run.data_args, run.folder / REJECTED_FILE)
        read_requirements(args, run.data_args, kind)
        content = fingerprint(table)
        names = [re.sub(r"[^\w.-]+", "_", value, flags=re.ASCII)[:MAX_NAME] for value in values]
        if len({name.lower() for name in names}) < len(names):
            names = [str(number) for number in range(1, 1 + len(values))]
        folds = {f"fold_{name}/": Fold(args.folds, value) for name, value in zip(names, values)}
        if args.final_model == "all":
            folds["final/"] = Fold(args.folds)
    seeds = range(run.args.seed, run.args.seed + args.num_seeds)
    return [Part(f"{start}seed_{seed}", fold, seed) for start, fold in folds.items() for seed in seeds], content


def open_state(run: Run, parts: Sequence[Part], rows: Json) -> Json:
    """Returns what the record of a command says: `arguments`, `rows` and which runs are `finished`; begins one.

    Raises:
        ArgumentError: the folder holds a single run, runs of other arguments or rows, runs that `parts` leave out, or a
            model that was changed.
    """
    if (run.folder / MODEL_MANIFEST).is_file():
        raise ArgumentError(f"{run.folder} holds the model of a single run. Choose another --output_dir.")
    values = {**vars(run.args), **vars(run.data_args), **vars(run.model_args)}
    names = {name for name in run.parser.origins if not FREE_TO_DIFFER.get(name, "").startswith(FREE)}
    asked = {name: values[name] for name in sorted(names & values.keys() - {*GROWS})}
    state = json.loads(json.dumps({"arguments": asked, "rows": rows, "finished": []}, default=str))
    before = read_object(run.folder / STATE)
    if not before.get("finished") or run.args.resume == "no":
        return state
    pairs = {name: (before["arguments"].get(name), value) for name, value in state["arguments"].items()}
    changed = [f"--{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now]
    changed += ["the rows are others"] if before["rows"] != state["rows"] else []
    kept = {*(part.folder for part in parts), *(name for name in before["finished"] if name.startswith("final/"))}
    if gone := [name for name in before["finished"] if name not in kept]:
        changed.append(f"it leaves out {', '.join(gone[:MAX_LISTED])}, as --num_seeds are fewer")
    if changed:
        raise ArgumentError(
            f"{run.folder} holds {len(before['finished'])} finished runs of another command: {'; '.join(changed)}. "
            "Give what was, another --output_dir, or --resume no."
        )
    state["finished"] = [name for name in before["finished"] if (run.folder / name / MODEL_MANIFEST).is_file()]
    for name in state["finished"]:
        check_model(run.folder / name)
    return state


def write_state(run: Run, state: Json) -> None:
    """Writes the record of a command; of several processes the main one does."""
    if run.args.process_index == 0:
        write_json(run.folder / STATE, state)


def repeat(task: Task, run: Run) -> Json:
    """Makes all runs that are not finished, and joins them; returns what `all_results.json` holds, of the main process.

    Args:
        run: of the command, entered.

    Raises:
        ArgumentError, DataError: before anything is trained: as `find_folds_of` and `open_state`.
        RequirementsFailed: a score over all rows is not as `--require` asks; everything was written before.

    Cost: that of a run for each; encoders that are frozen run once.
    """
    parts, rows = plan_parts(run)
    args = run.args
    state = do_on_main(args, lambda: open_state(run, parts, rows))
    write_state(run, state)
    hub = {"token": args.hub_token, "private": args.hub_private_repo is not False, "revision": args.hub_revision}
    repository = args.hub_model_id or run.folder.absolute().name
    if args.push_to_hub:
        repository = do_on_main(args, lambda: open_repository(repository, **hub))
    left = [part for part in parts if part.folder not in state["finished"]]
    run.log.info("%d runs: %d finished before, %d to make.", len(parts), len(parts) - len(left), len(left))
    run.shared = {"seed": args.seed, "layers": {}}
    for part in left:
        run.log.info("Run %d of %d: %s", 1 + parts.index(part), len(parts), part.folder)
        take_part(task, run, part, part == left[-1])
        start_run_log(run.folder, args.process_index == 0)
        state["finished"].append(part.folder)
        write_state(run, state)
    if args.process_index:
        return {}
    results = conclude(task, run, parts)
    if args.push_to_hub:
        run.log.info("On the Hub: %s", push_folder(run.folder, repository, **hub).commit_url)
    raise_failed(describe_failed(results.get("requirements") or ()), f"Models and report are whole, in {run.folder}.")
    return results


def take_part(task: Task, run: Run, part: Part, is_last: bool) -> None:
    """Takes all steps of one run, in its own folder."""
    own: Sequence[str] = ("--num_seeds", "1", "--seed", str(part.seed), "--output_dir", str(run.folder / part.folder))
    made = task.parse([*run.parser.arguments, *own])
    made.parser.arguments = run.parser.arguments  # the command that repeats the run: all of them
    made.data_args.fold = part.fold
    made.args.push_to_hub = False
    made.is_last = is_last
    made.shared = run.shared
    with made:
        task.take_steps(made)
    gc.collect()  # what trainers hold goes in circles
