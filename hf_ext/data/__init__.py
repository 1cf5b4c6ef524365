"""Data: from files and Hub datasets to clean, labelled and split rows; every refusal names file, row and column."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .arguments import (
        NUMBERS,
        RESIDUES,
        SPLIT_CLUSTER,
        DataArguments,
        Fold,
        LabelledArguments,
        ReadingArguments,
        TooLong,
    )
    from .batches.antibodies import (
        ANTIGEN_TOKENIZER,
        BOS_ID,
        EOS_ID,
        PAD_ID,
        SEP_ID,
        UNKNOWN_ID,
        VOCABULARY,
        AntibodyCollator,
        AntibodyPair,
        PairEncoder,
        StatesOf,
        decode_pair,
    )
    from .batches.batching import TokenBudgetBatchSampler, batches_by_tokens, count_tokens
    from .batches.collating import INPUTS_NAME, SequenceCollator
    from .batches.cutting import cut_batch
    from .batches.dealing import EvenBatchSampler, LengthGroupedSampler, RepeatedRows
    from .batches.input_checks import check_inputs
    from .batches.masking import EPOCH_COLUMN, MaskedLMCollator, MaskingEpochCallback, mark_evaluation, splitmix64
    from .batches.number_columns import NumberColumns
    from .batches.residue_counts import LETTERS, MAX_FEATURES, Columns, SequenceFeatures
    from .batches.streams import START, PassedRows, StreamBatchSampler, is_split_by_node, is_stream
    from .batches.tokenization import ResidueTokenizer, make_esm_tokenizer
    from .batches.varlen_layout import BatchLayout, VarlenLayout, change_layout, locate_labels
    from .batches.windows import WINDOWS, Limit, encode_windows, join_windows, limit_of
    from .cleaning import REJECTED_FILE, REJECTED_HEADER, RowSchema, format_errors
    from .columns import (
        TEACHER,
        FloatArray,
        as_dataset,
        check_columns,
        column_names,
        factorize,
        has_numbered_rows,
        iter_blocks,
        label_array,
        read_bounds,
        read_column,
        read_columns,
        reads_text,
        row_lengths,
    )
    from .demo import make_demo_encoders, make_demo_pairs, make_demo_table
    from .fingerprints import capture_random_states, compare_fingerprints, fingerprint, kept_random_states
    from .formats import irregular_kind, read_lines
    from .loading import LoadedData, LoadedSequences, check_labels, load_data, load_sequences
    from .near_copies import kmer_cosines, nearest_identities
    from .proteins import ESM2, ESM_VOCABULARY, RARE, STANDARD, UNKNOWN_RESIDUE, check_sequence
    from .reading import SOURCE_ROW, is_on_hub, local_files, peek_columns
    from .split_report import find_missing, leak_report
    from .splits import draw_rows, find_folds, find_whole
    from .variants.features import Variants
    from .variants.substitutions import find_substitutions
    from .variants.wild_type import find_variants, find_wild_type, read_mutations, read_wild_type
else:
    __getattr__, __dir__, __all__ = offer(__name__)
