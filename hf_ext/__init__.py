"""hf_ext: the Hugging Face Trainer for protein language models on the hardware you have.

Names are imported when first used, so that `import hf_ext` costs nothing and changes nothing.
"""

from typing import TYPE_CHECKING

from .faces import offer

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .arguments.parser import FastArgumentParser
    from .arguments.presets import PRESETS
    from .data.batches.antibodies import AntibodyCollator, PairEncoder
    from .data.batches.batching import TokenBudgetBatchSampler
    from .data.batches.collating import SequenceCollator
    from .data.batches.masking import MaskedLMCollator
    from .data.batches.tokenization import ResidueTokenizer
    from .embeddings.store import EmbeddingStore
    from .errors import exit_on_errors
    from .generation.task import GenerationTask
    from .hardware import detect_hardware
    from .masked_lm.task import MaskedLMTask
    from .models.affinity import AffinityModel
    from .models.configuration import AffinityConfig
    from .models.generation.configuration import GeneratorConfig
    from .models.generation.model import AntibodyGenerator
    from .models.kernels.faesm_bridge import swap_faesm
    from .models.kernels.packing import pack_encoders
    from .models.lora import merged_copy
    from .plan import Plan, make_plan
    from .property.predictor import AffinityPredictor
    from .property.task import AffinityTask
    from .reporting.throughput import ThroughputCallback
    from .tasks.running import Run
    from .tasks.task import Task
    from .trainer import FastSeq2SeqTrainer, FastTrainer
    from .training_args import FastTrainingArguments
else:
    __getattr__, __dir__, __all__ = offer(__name__, "__version__")
