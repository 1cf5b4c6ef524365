"""hf_ext: the Hugging Face Trainer for protein language models on the hardware you have.

Names are imported when first used, so that `import hf_ext` costs nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AffinityConfig": "models.configuration",
    "AffinityModel": "models.affinity",
    "AffinityPredictor": "property.predictor",
    "AffinityTask": "property.task",
    "AntibodyCollator": "data.batches.antibodies",
    "AntibodyGenerator": "models.generation.model",
    "EmbeddingStore": "embeddings.store",
    "FastArgumentParser": "arguments.parser",
    "FastSeq2SeqTrainer": "trainer",
    "FastTrainer": "trainer",
    "FastTrainingArguments": "training_args",
    "GenerationTask": "generation.task",
    "GeneratorConfig": "models.generation.configuration",
    "PRESETS": "arguments.presets",
    "MaskedLMCollator": "data.batches.masking",
    "MaskedLMTask": "masked_lm.task",
    "PairEncoder": "data.batches.antibodies",
    "Plan": "plan",
    "ResidueTokenizer": "data.batches.tokenization",
    "Run": "tasks.running",
    "SequenceCollator": "data.batches.tokenization",
    "Task": "tasks",
    "ThroughputCallback": "reporting.throughput",
    "TokenBudgetBatchSampler": "data.batches.batching",
    "detect_hardware": "hardware",
    "exit_on_errors": "errors",
    "make_plan": "plan",
    "merged_copy": "models.lora",
    "pack_encoders": "models.kernels.packing",
    "swap_faesm": "models.kernels.faesm_bridge",
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_ext' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
