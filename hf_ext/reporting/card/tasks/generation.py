"""What a card says of a generator of antibodies: what it writes, how to ask it, and what it must not be used for."""

from __future__ import annotations

from typing import Any

from ... import units
from ...markdown import code, code_block, plain, plain_line
from ...report.run_files import RunFiles
from ...report.tasks.generation import MODEL, effect_sentence, failed_gates, generation_scores, measure_title
from ...report.values import as_dict
from ...units import capitalize
from .base import TaskCard

EXAMPLE = "MKTAYIAKQRQISFVKSHFSRQLEE"  # made up
_FROZEN = "frozen"


class GenerationCard(TaskCard):
    heading = "What it writes"
    tags = ("biology", "protein", "protein-language-model", "antibody-generation")
    index_task = ("text-generation", "Antibodies for an antigen")
    demo_effect = "writes"

    def description(self) -> list[str]:
        return _description(self.run)

    def subject(self) -> str:
        return "writing sequences like those of the training antibodies"

    def loading_code(self, repo: str) -> list[str]:
        return _code(repo)

    def loading_notes(self, repo: str) -> list[str]:
        return _sampling(repo)

    def use_section(self) -> list[str]:
        return _use(self.run)

    def bases(self) -> list[dict[str, Any]]:
        return _bases(self.run)

    def scored_split(self) -> tuple[str, dict[str, Any]]:
        return "test", generation_scores(self.run)

    def metric_title(self, metric: str) -> str:
        return measure_title(metric)

    def score_notes(self) -> list[str]:
        return _measured(self.run)

    def findings(self) -> list[str]:
        verdict = as_dict(as_dict(self.run.results.get("generation")).get("verdict"))
        found = [as_dict(one) for one in verdict.get("findings") or []]
        wrong = [one for one in found if one.get("is_failure") or one.get("kind") in ("undecided", "discriminator")]
        return [plain(capitalize(f"{one.get('text')}.")) for one in wrong]


def _description(run: RunFiles) -> list[str]:
    """What it writes from what, and what it is made of."""
    settings, model = run.settings, as_dict(run.results.get("model"))
    chains = ", ".join(code(settings[name]) for name in ("heavy_column", "light_column") if settings.get(name))
    source = code(settings.get("antigen_column") or "antigen")
    lines = [
        f"A generator of antibodies ({plain(model.get('architecture', 'architecture not recorded'))}): from an "
        f"antigen's sequence ({source}) it writes the variable domains of an antibody ({chains})."
    ]
    if run.results.get("stage"):
        lines.append(f"It is of stage {run.results['stage']} of 3.")
    return [" ".join(lines)]


def _code(repo: str) -> list[str]:
    """Lines that sample from it as they stand."""
    return [
        "from hf_ext.generation.generator import load_generator",
        "from hf_ext.generation.sampling import sample_pairs",
        "",
        f'generator = load_generator("{repo}")',
        f'(samples,) = sample_pairs(generator.model, generator.tokenizer, ["{EXAMPLE}"], num_samples=5)',
        "for one in samples:",
        "    print(one.pair.heavy, one.pair.light, one.pair.malformed, one.log_probability)",
    ]


def _sampling(repo: str) -> list[str]:
    """The command that ranks and marks what it writes."""
    command = f"hf-ext sample --model {repo} --dataset_name antigens.fasta --training_data pairs.csv"
    return [
        "Outputs may be malformed, invalid or copies of training antibodies. This marks them, and ranks the rest:",
        "",
        code_block(command, "bash"),
        "",
    ]


def _use(run: RunFiles) -> list[str]:
    """Markdown: what it must not be used for."""
    return [
        "## What it must not be used for",
        "",
        "- **No therapeutic, diagnostic or other clinical use**, and no decision about a patient or an animal. Nothing "
        "here says that an output binds, folds, can be made, is stable, is not toxic or is not immunogenic.",
        "- **Not validated in a laboratory.** No output of this model was made or measured. Scores are computed from "
        "sequences; a predicted affinity is another model's guess. An output is a sequence to examine by experiment, "
        "under the rules that hold for such work where you are.",
        f"- **It may reproduce training antibodies**, and with them whatever rights are in these. {_copies(run)}",
        "- Not for antigens unlike those of its training data without a test of your own, and not for designing "
        "anything meant to harm.",
        "",
    ]


def _copies(run: RunFiles) -> str:
    model = generation_scores(run).get(MODEL, {})
    if not units.is_finite(as_dict(model.get("memorised")).get("value")):
        return "How often it does was not measured; compare outputs with the training data before you use them."
    exact, near = (units.score(model.get(name)) for name in ("memorised", "near_copies"))
    return (
        f"Share of its outputs for test antigens that are a training pair to the residue: {exact}; with both chains "
        f"95 % identical to training chains: {near}. Compare outputs with the training data before you use them."
    )


def _measured(run: RunFiles) -> list[str]:
    """Conditions and gates, below the table of scores."""
    found = as_dict(run.results.get("generation"))
    effects = [plain(effect_sentence(as_dict(one))) for one in found.get("effects") or []]
    gates = [f"**FAILED** {plain(text)}" for text in failed_gates(run)]
    if run.results.get("gates") and not gates:
        gates = [f"The gates of stage {run.results.get('stage')} were passed."]
    lines = [*effects, *(plain_line(note) for note in found.get("notes") or []), *gates]
    return [*(f"- {line}" for line in lines), ""] if lines else []


def _bases(run: RunFiles) -> list[dict[str, Any]]:
    """The pretrained encoder of antigens, as `TaskCard.bases` lists such."""
    model = as_dict(run.results.get("model"))
    name = model.get("antigen_encoder") or run.settings.get("antigen_encoder")
    if not name:
        return []
    training = model.get("encoder_training") or run.settings.get("encoder_training") or _FROZEN
    revision = run.settings.get("antigen_encoder_revision")
    columns = [[str(run.settings.get("antigen_column") or "antigen")]]
    return [{"encoder": name, "revision": revision, "training": training, "inputs": columns}]
