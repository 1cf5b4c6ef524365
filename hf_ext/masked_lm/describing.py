"""What report and card say of a masked language model: perplexity and accuracy beside residue frequencies."""

from __future__ import annotations

from ..reporting import (
    PLACEHOLDER,
    Block,
    Code,
    Page,
    RunRecord,
    Text,
    index_scores,
    score_numbers,
    score_table,
    verdict_limits,
)
from ..text import join_words

# Made up. Residues apart: BERT's vocabularies need it, ESM's give the same ids either way.
EXAMPLE = "M K T A Y I A K Q"
MEANING = (
    "Cross-entropy in nats, perplexity is its exponential. The unigram predicts from how often residues occur in "
    "training, whatever stands around them; a model that is no better has learned nothing about order."
)


def describe(run: RunRecord) -> Page:
    """Returns the page of a run, from what its `all_results.json` holds."""
    columns = run.sequence_columns
    name = "test" if run.test else "validation"
    scored = run.test or run.validation
    blocks: list[Block] = [score_table(scored.scores, f"The {name} split."), Text(MEANING)] if scored else []
    is_adapter = bool(run.settings.get("use_peft"))
    return Page(
        title=f"Masked language model of {join_words(columns)}" if columns else "Masked language model",
        summary="A masked protein language model: it predicts masked residues of amino-acid sequences. Trained on "
        f"{join_words(columns or ['sequence'])}.",
        numbers=score_numbers(scored, ["perplexity", "accuracy"], name),
        results=blocks,
        limits=verdict_limits(run.verdict),
        subject="filling in masked residues, and about nothing else: no safety, no function in a cell, no patient",
        loading=[Code(_loading_code(is_adapter), "python")],
        needs_bases=is_adapter and not run.settings.get("save_full"),
        scores=[score for score in index_scores(scored) if score[0] != "num_tokens"],
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
