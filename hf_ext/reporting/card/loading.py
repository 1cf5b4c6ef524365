"""How to load the model: lines that run as they stand, on made-up sequences."""

from __future__ import annotations

import json

from ..markdown import code, code_block
from ..report.run_files import RunFiles
from ..report.summary import label_name, list_columns
from ..report.values import as_dict
from .generation import generator_code, sampling_lines
from .metadata import is_adapter
from .names import PLACEHOLDER, bases, is_hub_id, last_part

# Made up, of a usual composition; a user's own sequences never stand in a card.
EXAMPLES = ("EVQLVESGGGLVQPGGSLRLSCAAS", "DIQMTQSPSSLSASVGDRVTITCRAS", "MKTAYIAKQRQISFVKSHFSRQLEE")


def loading_section(run: RunFiles, repo: str) -> list[str]:
    """Markdown: what to install, the code, what it returns, what else must be there."""
    shown = _code(run, repo)
    package = "`peft`" if is_adapter(run) else "`transformers`" if run.is_masked_lm else "`hf_ext`"
    lines = ["## How to load it", "", f"With {package} installed:", "", code_block("\n".join(shown), "python"), ""]
    if repo == PLACEHOLDER:
        lines += [f"`{PLACEHOLDER}` is the model's id on the Hub, or the path of its folder.", ""]
    if run.is_generator:
        lines += sampling_lines(repo)
    elif not run.is_masked_lm:
        label = code(label_name(run))
        unit = f"higher for a higher {label}" if ranks(run) else f"in the unit of {label}"
        lines += [
            f"`predict` takes a list of dicts, a dict of lists, a `datasets.Dataset` or a pandas DataFrame with "
            f"{_columns_text(run)}, and returns one number per row (float32, {unit}). It refuses sequences that "
            "hold anything but residues and names their rows.",
            "",
        ]
    missing = missing_bases(run)
    if missing:
        names = " and ".join(map(code, missing))
        lines += [
            f"**This repository lacks weights that it needs:** those of {names}, which came from a local folder and "
            "not from the Hub. It loads only where that folder is.",
            "",
        ]
    return lines


def _code(run: RunFiles, repo: str) -> list[str]:
    if run.is_generator:
        return generator_code(repo)
    return _masked_lm_code(run, repo) if run.is_masked_lm else _affinity_code(run, repo)


def ranks(run: RunFiles) -> bool:
    """Whether the model learned an order only, so that its predictions have no unit."""
    return as_dict(run.results.get("model")).get("loss") == "ranking"


def missing_bases(run: RunFiles) -> list[str]:
    """Pretrained models that this one needs, that it does not contain and that are not on the Hub; last parts."""
    contained = bool(run.settings.get("save_full")) or (run.is_masked_lm and not is_adapter(run))
    found = [
        last_part(base["encoder"])
        for base in bases(run)
        if base.get("training") != "full" and not contained and not is_hub_id(base["encoder"], base.get("revision"))
    ]
    return list(dict.fromkeys(found))


def sequence_columns(run: RunFiles) -> list[str]:
    """The columns that the model reads, in its order."""
    return list_columns(run) or ["sequence"]


def _columns_text(run: RunFiles) -> str:
    columns = sequence_columns(run)
    return f"the column{'s' if len(columns) > 1 else ''} " + ", ".join(map(code, columns))


def _affinity_code(run: RunFiles, repo: str) -> list[str]:
    cells = [f'{json.dumps(name)}: "{EXAMPLES[i % len(EXAMPLES)]}"' for i, name in enumerate(sequence_columns(run))]
    return [
        "from hf_ext import AffinityPredictor",
        "",
        f'predictor = AffinityPredictor.from_pretrained("{repo}")',
        f"rows = [{{{', '.join(cells)}}}]",
        "print(predictor.predict(rows))",
    ]


def _masked_lm_code(run: RunFiles, repo: str) -> list[str]:
    kind, package = ("AutoPeftModel", "peft") if is_adapter(run) else ("AutoModelForMaskedLM", "transformers")
    imports = [f"from {package} import {kind}", "from transformers import AutoTokenizer"]
    if package == "transformers":
        imports = ["from transformers import AutoModelForMaskedLM, AutoTokenizer"]
    # Residues apart: BERT's vocabularies need it, ESM's give the same ids either way.
    return [
        *imports,
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        f'model = {kind}.from_pretrained("{repo}")',
        f'batch = tokenizer("{" ".join(EXAMPLES[2][:9])} " + tokenizer.mask_token + " R Q", return_tensors="pt")',
        "print(tokenizer.decode(model(**batch).logits[0, 10].argmax()))",
    ]
