"""Names from inside the folders of hf_ext that several test files use: where they stand is written here alone."""

# ruff: noqa: F401  # others import these names
from hf_ext.checkpoints.manifest import MANIFEST, Manifest
from hf_ext.checkpoints.run_lock import LOCK, lock_folder
from hf_ext.comparing.running import ChildFailed, SideRun
from hf_ext.comparing.sides import CompareArguments, Side, make_command, make_sides
from hf_ext.data.batches.varlen_layout import LayoutMaker
from hf_ext.doctor.command import DoctorArguments
from hf_ext.doctor.findings import find_problems
from hf_ext.doctor.page import format_page
from hf_ext.evaluation.metrics.regression import Regression
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.building import Inputs
from hf_ext.generation.building import build_model as build_generator
from hf_ext.generation.judging.judgement import judge_condition, judge_generated
from hf_ext.generation.preparing import load_pairs, resolve_columns
from hf_ext.generation.rows import AntibodyRows, Sampling
from hf_ext.generation.sampling import load_generator, sample_pairs
from hf_ext.generation.stages import check_gates, have_passed, resolve_stage
from hf_ext.heads.intervals import conformal_half_widths
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.steps import build_collator as build_masked_lm_collator
from hf_ext.masked_lm.steps import build_model as build_masked_lm
from hf_ext.masked_lm.steps import build_tokenizer, prepare_splits
from hf_ext.memory.probe import BLOCK_BYTES, OTHER, Ledger, record_pass
from hf_ext.memory.report import find_switches
from hf_ext.property.building import build_model as build_affinity_model
from hf_ext.property.scoring import compute_metrics, score_split
from hf_ext.speedups.base import DataFacts
from hf_ext.speedups.fused_layers import label_only
from hf_ext.speedups.precision import VARIABLES
