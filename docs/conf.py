"""Builds these pages: sphinx-build -n -W --keep-going -b html docs outputs/docs

Pages are Markdown that reads on a code host as well. A link that leads nowhere, a page that no other names and a
docstring that does not parse are warnings of Sphinx, and with -W errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree, wherever another one is installed

import hf_ext  # noqa: E402
from hf_ext import cli  # noqa: E402

project = "hf_ext"
author = "the authors of hf_ext"
release = version = hf_ext.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"hf_ext {release}"
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3  # [text](page.md#a-heading) works as it does on a code host

default_role = "code"  # `name` in a docstring is code, as it is in Markdown
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_numpy_docstring = False
# Annotations name classes of torch and transformers, whose indexes are not at hand without a network.
nitpick_ignore_regex = [("py:.*", ".*")]

# To a file beside docs/, which a built site does not have.
_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./[\w./-]+(?:#[\w-]+)?\)")


def name_files_outside(app: Any, page: str, source: list[str]) -> None:
    """On a built site a link to a file of the repository is its name: the site holds pages only."""
    source[0] = _LINK_OUT.sub(lambda link: f"`{link[1].strip('`')}`", source[0])


def list_flags(app: Any, page: str, source: list[str]) -> None:
    """Gives the page of the command line what `hf-ext COMMAND --help all` prints of each command."""
    if page == "cli":
        helps = (f"### hf-ext {name}\n\n```text\n{read_help(name)}```" for name in cli.COMMANDS)
        source[0] = source[0].replace("<!-- flags -->", "\n\n".join(helps))


def read_help(command: str) -> str:
    """All flags of a command, as its help prints them."""
    os.environ["COLUMNS"] = "110"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([command, "--help", "all"])
    return printed.getvalue()


def list_own_fields(app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Adds to `FastTrainingArguments` the fields that `TrainingArguments` lacks, with their help."""
    if name != "hf_ext.FastTrainingArguments":
        return
    from transformers import TrainingArguments

    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(documented):
        if field.name not in stock:
            lines += ["", f"``{field.name}``", f"   {field.metadata.get('help', '')}"]


def shorten_signature(
    app: Any, what: str, name: str, documented: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """A dataclass of some hundred fields has no signature that anybody reads."""
    return ("(**fields)", returned) if signature and signature.count(",") > 40 else None


def setup(app: Any) -> None:
    app.connect("source-read", name_files_outside)
    app.connect("source-read", list_flags)
    app.connect("autodoc-process-docstring", list_own_fields)
    app.connect("autodoc-process-signature", shorten_signature)
