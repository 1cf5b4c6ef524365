"""Docstrings of functions begin with a verb, and what users read uses plain words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERBS = """
Accepts Adds Allocates Allows Appends Applies Asks Assigns Attends Averages Begins Blocks Bounds Broadcasts Builds
Calls Captures Carries Changes Checks Chooses Cleans Clears Closes Collects Combines Compares Compiles Computes
Concatenates Continues Converts Copies Correlates Counts Creates Cuts Decides Decodes Deletes Derives
Describes Detects Divides Does Downloads Draws Drops Embeds Encodes Ends Enters Estimates Evaluates Feeds
Fetches Fills Filters Finds Finishes Fits Flattens Forgets Formats Forwards Frees Freezes Fuses Gathers
Generates Gives Goes Groups Guards Guesses Halves Handles Hands Has Hashes Hears Holds Identifies Implements
Imports Initializes Inserts Installs Iterates Joins Judges Keeps Leaves Lets Links Lists Loads Locks Logs Meets
Looks Lowers Makes Maps Marks Masks Matches Measures Merges Moves Names Narrows Normalizes Opens Packs Pads
Parses Picks Pins Plans Points Pools Predicts Prepares Prints Processes Projects Provides Pushes Puts Quantizes
Raises Ranks Rates Reads Rebuilds Recomputes Records Reduces Refuses Registers Releases Removes Renames Renders
Repeats Replaces Reports Resamples Resets Resolves Restores Resumes Returns Rounds Runs Samples Saves Says
Scales Scores Searches Selects Sends Sets Shows Shuffles Silences Skips Solves Sorts Splits Standardizes
Starts Stays Steps Stops Stores Streams Sums Swaps Switches Syncs Takes Tells Tests Tokenizes Tracks Trains
Tries Truncates Turns Undoes Unpacks Updates Uploads Uses Validates Verifies Waits Warns Watches Widens Works
Wraps Writes Yields
"""
PLAIN = re.compile(r"\b(mend(s|ed|ing)?|let(s|ting)? go|nobody|somebody)\b", re.IGNORECASE)


def walk(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "tests" not in path.relative_to(ROOT).parts:  # an example brings its own
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def first_words(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and first word of the docstring of each function that is no property and not Python's own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
        text = ast.get_docstring(node)
        if text and not decorators & {"property", "cached_property"}:
            yield node.name, text.split()[0].rstrip(".,:;")


def texts(tree: ast.Module) -> Iterator[str]:
    """Strings that are no docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    verbs = {*VERBS.split()}
    named = [(path, *one) for path, tree in walk("hf_ext") for one in first_words(tree)]
    assert [f"{path} {name}: {word}" for path, name, word in named if word not in verbs] == []


def test_users_read_plain_words() -> None:
    found = [
        (str(path), text) for path, tree in walk("hf_ext", "recipes") for text in texts(tree) if PLAIN.search(text)
    ]
    assert found == []


def test_a_noun_and_an_odd_word_would_be_seen() -> None:
    tree = ast.parse(
        'def f():\n    """The sum."""\n    return "Mend it"\n\n\nclass A:\n    def g(self):\n        """Adds."""\n'
    )
    assert [*first_words(tree)] == [("f", "The"), ("g", "Adds")]
    assert [text for text in texts(tree) if PLAIN.search(text)] == ["Mend it"]
    assert not PLAIN.search("Amend, outlet gone")
