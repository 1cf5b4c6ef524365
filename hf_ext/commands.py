"""The subcommands of `hf-ext`, and how the running program was started, in words that a user can type."""

from __future__ import annotations

import sys

PROGRAM = "hf-ext"
# Name -> the module whose `main(words)` runs it, and its line in `hf-ext --help`; in that order.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("hf_ext.recipes.max_speed", "train an affinity or property model on labelled sequences"),
    "mlm": ("hf_ext.recipes.mlm", "train a masked protein language model, a new one or further"),
    "generate": (
        "hf_ext.recipes.generate_antibody",
        "train a generator of antibodies for antigens, in stages",
    ),
    "sample": ("hf_ext.recipes.sample", "draw antibodies from a trained generator, and rank them"),
    "predict": ("hf_ext.recipes.predict", "predict with a trained model: a table or FASTA in, a CSV out"),
    "evaluate": ("hf_ext.recipes.evaluate", "score trained models on labelled rows, and compare them"),
    "doctor": ("hf_ext.recipes.doctor", "tell what a run would do, here or on another card, before it starts"),
    "compare": ("hf_ext.recipes.compare", "measure ways to train against each other, with intervals"),
    "report": ("hf_ext.recipes.report", "write report and model card of a finished run anew"),
    "resume": ("hf_ext.recipes.resume_check", "tell what a folder of checkpoints goes on from; convert old ones"),
}


def name_program(command: str) -> None:
    """Makes a subcommand what help pages, records and locks of this process call the program."""
    sys.argv[0] = f"{PROGRAM} {command}"


def program_words() -> list[str]:
    """How this process was started, without arguments: ["hf-ext", "train"], or the path of a script."""
    program, _, command = sys.argv[0].partition(" ")
    return [program, command] if program == PROGRAM and command in COMMANDS else [sys.argv[0]]


def recipe_command(recipe: str) -> str:
    """How a user starts a recipe: as a subcommand where this process is one, else as the script of a clone.

    Args:
        recipe: the name of its file, "resume_check" say.
    """
    names = {module.rpartition(".")[2]: name for name, (module, _) in COMMANDS.items()}
    if len(program_words()) == 1:
        return f"python recipes/{recipe}.py"
    return f"{PROGRAM} {names[recipe]}" if recipe in names else f"python -m hf_ext.recipes.{recipe}"
