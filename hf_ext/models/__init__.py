"""Models: encoders in towers, and a head."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .affinity import AffinityModel
    from .arguments import AUTO_LAYER, EMBEDDINGS, Head, ModelArguments
    from .blocks import (
        block_classes,
        block_lists,
        block_parts,
        choose_classes,
        describe_blocks,
        exact_modules,
        find_base_layers,
        find_blocks,
        find_recomputed,
        keep_activations,
        recompute,
        unused_parameters,
    )
    from .configuration import VECTORS, AffinityConfig, EncoderSpec, TowerSpec, Training, build_config, input_name
    from .encoders import (
        NoMaskedHeadError,
        build_encoder,
        final_norm_of,
        fingerprint_weights,
        identify_encoder,
        layers_of,
        load_encoder,
        load_tokenizer,
        read_encoder,
    )
    from .families import FAMILIES, check_family, choose_encoder, limit_of_positions
    from .generation.configuration import GENERATOR_RANGES, SIZES, GeneratorConfig
    from .generation.esm import state_encoder, state_key
    from .generation.model import NEVER_WRITTEN, AntibodyGenerator
    from .generation.parts import EncoderStates
    from .head import LIKELIHOOD, ONE_LAYER, POOLINGS, Pooling
    from .kernels.attention import KERNELS, PREFIX, register_attention
    from .kernels.blocked_attention import flop_counter
    from .kernels.faesm_bridge import restore_faesm, swap_faesm
    from .kernels.packing import PACKED_FAMILIES, PaddingWatch, find_encoders, is_packed, pack_encoders, unpack_encoders
    from .kernels.process_settings import FAST_CPU, FAST_GPU, HELD_MATMUL, Held, read_matmul_precision, replaced
    from .kernels.replaced_forwards import (
        find_replaceable,
        has_foreign_forward,
        is_from,
        is_in,
        replace_forward,
        restore_forward,
        restore_forwards,
    )
    from .lora import LoraSettings, has_adapters, merged_copy, narrow, require_base, unwrap_peft, wrap_with_lora
    from .losses import (
        LossKind,
        balanced_weights,
        class_losses,
        exact_loss,
        find_loss_kind,
        has_loss_of,
        sum_loss_rows,
    )
    from .mixed.ensemble import (
        COMPARED,
        COUNTS,
        DIRECTIONS,
        FEATURES,
        LEAST,
        LINKS,
        HeadEnsemble,
        principal_directions,
    )
    from .mixed.kernel_map import NUM_LANDMARKS, KernelMap
    from .mixed.stacks import NEAREST, PERCEPTRON, PRODUCT, NearestStack, NetworkStack
    from .optimizers import MuonAdamW, block_matrices, find_host_optimizer, move_to_host
    from .towers import in_float32
else:
    __getattr__, __dir__, __all__ = offer(__name__)
