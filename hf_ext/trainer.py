"""The Trainer subclass: small mixins in front of the Hugging Face Trainer, which does the rest."""

from __future__ import annotations

from transformers import Trainer

from .mixins.checkpointing import CheckpointMixin
from .mixins.dataloaders import DataLoaderMixin
from .mixins.disk_budget import DiskBudgetMixin
from .mixins.embedding_cache import EmbeddingCacheMixin
from .mixins.encoder_rate import EncoderRateMixin
from .mixins.exact_loss import ExactLossMixin
from .mixins.masking_epoch import MaskingEpochMixin
from .mixins.mirroring import MirrorMixin
from .mixins.nan_policy import NanPolicyMixin
from .mixins.planning import PlanMixin
from .mixins.restoring import RestoreMixin
from .mixins.resuming import ResumeMixin
from .mixins.saving import SavingMixin
from .mixins.standardization import StandardizationMixin
from .mixins.stopping import StoppingMixin
from .mixins.throughput import ThroughputMixin


class FastTrainer(
    ResumeMixin,
    RestoreMixin,
    MirrorMixin,
    CheckpointMixin,
    DiskBudgetMixin,
    StoppingMixin,
    NanPolicyMixin,
    PlanMixin,
    EmbeddingCacheMixin,
    StandardizationMixin,
    ExactLossMixin,
    EncoderRateMixin,
    MaskingEpochMixin,
    DataLoaderMixin,
    SavingMixin,
    ThroughputMixin,
    Trainer,
):
    """`transformers.Trainer` with a plan: takes the same arguments, plus `plan`; use it the same way."""
