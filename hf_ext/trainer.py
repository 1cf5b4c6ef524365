"""The Trainer subclass: small mixins in front of the Hugging Face Trainer, which does the rest."""

from __future__ import annotations

from transformers import Trainer

from .mixins.checkpointing import CheckpointMixin
from .mixins.collapse_alarm import CollapseAlarmMixin
from .mixins.cpu_offload import CpuOffloadMixin
from .mixins.data_workers import DataWorkersMixin
from .mixins.dataloaders import DataLoaderMixin
from .mixins.disk_budget import DiskBudgetMixin
from .mixins.early_stopping import EarlyStoppingMixin
from .mixins.embedding_cache import EmbeddingCacheMixin
from .mixins.encoder_rate import EncoderRateMixin
from .mixins.evaluating import EvaluationMixin
from .mixins.exact_loss import ExactLossMixin
from .mixins.leaving import LeavingMixin
from .mixins.loss_check import LossCheckMixin
from .mixins.masking_epoch import MaskingEpochMixin
from .mixins.mirroring import MirrorMixin
from .mixins.muon import MuonMixin
from .mixins.nan_policy import NanPolicyMixin
from .mixins.planning import PlanMixin
from .mixins.progress import ProgressMixin
from .mixins.pushing import PushingMixin
from .mixins.repeatable_loading import RepeatableLoadingMixin
from .mixins.restoring import RestoreMixin
from .mixins.resuming import ResumeMixin
from .mixins.row_order import RowOrderMixin
from .mixins.run_folder import RunFolderMixin
from .mixins.saving import SavingMixin
from .mixins.sharding import ShardingMixin
from .mixins.standardization import StandardizationMixin
from .mixins.stopping import StoppingMixin
from .mixins.throughput import ThroughputMixin
from .mixins.training_length import TrainingLengthMixin
from .mixins.zero import ZeroMixin


class FastTrainer(
    TrainingLengthMixin,
    DataWorkersMixin,
    RunFolderMixin,
    ZeroMixin,
    ResumeMixin,
    RestoreMixin,
    MirrorMixin,
    CheckpointMixin,
    DiskBudgetMixin,
    PushingMixin,
    StoppingMixin,
    EarlyStoppingMixin,
    CollapseAlarmMixin,
    EvaluationMixin,
    ProgressMixin,
    LossCheckMixin,
    NanPolicyMixin,
    PlanMixin,
    EmbeddingCacheMixin,
    StandardizationMixin,
    ExactLossMixin,
    CpuOffloadMixin,
    EncoderRateMixin,
    MuonMixin,
    MaskingEpochMixin,
    RowOrderMixin,
    RepeatableLoadingMixin,
    DataLoaderMixin,
    SavingMixin,
    ShardingMixin,
    ThroughputMixin,
    LeavingMixin,
    Trainer,
):
    """`transformers.Trainer` with a plan: takes the same arguments, plus `plan`; use it the same way."""
