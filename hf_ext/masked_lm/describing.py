"""What report and card say of a masked language model: perplexity and accuracy beside residue frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..reporting.page import PLACEHOLDER, Block, Code, Page, Text
from ..reporting.run_files import as_dict, list_columns
from ..reporting.scores import index_scores, score_numbers, score_table, verdict_limits
from ..text.units import join_words

# Made up. Residues apart: BERT's vocabularies need it, ESM's give the same ids either way.
EXAMPLE = "M K T A Y I A K Q"
MEANING = (
    "Cross-entropy in nats, perplexity is its exponential. The unigram predicts from how often residues occur in "
    "training, whatever stands around them; a model that is no better has learned nothing about order."
)


def describe(results: Mapping[str, Any]) -> Page:
    """Returns the page of a run, from what its `all_results.json` holds."""
    columns = list_columns(results)
    settings = as_dict(results.get("settings"))
    name = "test" if results.get("test") else "validation"
    scores = as_dict(results.get(name))
    blocks: list[Block] = [score_table(scores, f"The {name} split."), Text(MEANING)] if scores else []
    is_adapter = bool(settings.get("use_peft"))
    return Page(
        title=f"Masked language model of {join_words(columns)}" if columns else "Masked language model",
        summary="A masked protein language model: it predicts masked residues of amino-acid sequences. Trained on "
        f"{join_words(columns or ['sequence'])}.",
        numbers=score_numbers(
            {"scores": scores, "baselines": ["unigram"] if scores else []}, ["perplexity", "accuracy"], name
        ),
        results=blocks,
        limits=verdict_limits(results),
        subject="filling in masked residues, and about nothing else: no safety, no function in a cell, no patient",
        loading=[Code(_loading_code(is_adapter), "python")],
        needs_bases=is_adapter and not settings.get("save_full"),
        scores=[score for score in index_scores(as_dict(scores.get("model"))) if score[0] != "num_tokens"],
        split=name,
        tags=["biology", "protein", "protein-language-model", "masked-lm"],
        pipeline_tag="fill-mask",
        library_name="peft" if is_adapter else "transformers",
        task_type="fill-mask",
        task_name="Masked language modelling",
    )


def _loading_code(is_adapter: bool) -> str:
    kind = "AutoPeftModel" if is_adapter else "AutoModelForMaskedLM"
    imports = [f"from transformers import {kind}, AutoTokenizer"]
    if is_adapter:
        imports = [f"from peft import {kind}", "from transformers import AutoTokenizer"]
    lines = [
        *imports,
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{PLACEHOLDER}")',
        f'model = {kind}.from_pretrained("{PLACEHOLDER}")',
        f'batch = tokenizer("{EXAMPLE} " + tokenizer.mask_token + " R Q", return_tensors="pt")',
        "print(tokenizer.decode(model(**batch).logits[0, 10].argmax()))",
    ]
    return "\n".join(lines)
