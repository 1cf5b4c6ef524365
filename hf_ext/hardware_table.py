"""The table of devices, with a source per row; `hardware` looks them up.

Reading the table:
- TFLOPS are the vendor's dense peaks (no 2:4 sparsity; data sheets since Hopper print only the sparse ones, which are
  halved here) with FP32 accumulation, the mode that torch's matmul runs in. GeForce cards run FP32 accumulation at half
  the rate that their boxes print. What no vendor paper states is left out.
- `memory_gib` of a described device is the vendor's nominal size; the driver of a live one reports 1-9 % less.
"""

from __future__ import annotations

import dataclasses

CUDA_GUIDE = "NVIDIA CUDA C++ Programming Guide, compute capabilities"
_T4 = "NVIDIA T4 Tensor Core GPU datasheet (2019)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet (2020)"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021)"
_A10 = "NVIDIA A10 Tensor Core GPU datasheet (2021)"
_A10G = "AWS/NVIDIA A10G datasheet (2022)"
_L4 = "NVIDIA L4 Tensor Core GPU datasheet (2023), sparse peaks halved"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), sparse peaks halved"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (2024), sparse peaks halved"
_B200 = "NVIDIA Blackwell datasheet, HGX B200 column (2025), sparse peaks halved"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper V2 (2021)"
_ADA = "NVIDIA Ada GPU Architecture white paper V2 (2023)"
_GB202 = "NVIDIA RTX Blackwell GPU Architecture white paper V1 (2025)"
_TURING = "NVIDIA Turing GPU Architecture white paper (2018), reference clocks"
_A30 = "NVIDIA A30 Tensor Core GPU datasheet (2022)"
_A40 = "NVIDIA A40 datasheet (2021)"
_A6000 = "NVIDIA Ampere GA102 GPU Architecture white paper V2 (2021), RTX A6000"
_P100 = "NVIDIA Tesla P100 datasheet (2016)"
_A2 = "NVIDIA A2 datasheet (2022), sparse peaks halved"
_L40 = "NVIDIA L40 datasheet (2022), sparse peaks halved"
_PRO = "NVIDIA RTX PRO 6000 Blackwell data sheets: memory; no peak without sparsity is printed"
_L40S = "NVIDIA L40S datasheet (2023)"
_ADA_6000 = "NVIDIA Ada GPU Architecture white paper V2 (2023), RTX 6000 Ada"
_H100_NVL = "NVIDIA H100 Tensor Core GPU datasheet (2024), H100 NVL column, sparse peaks halved"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (2024), sparse peaks halved"
# FP32 = 2 x CUDA cores x boost clock; the white papers print no tensor peaks for these.
_PRODUCT = "NVIDIA GeForce {} product page: FP32 from CUDA cores x boost clock"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one device can do; every flag means natively, never by emulation.

    Attributes:
        name: the table's name ("T4", "A100-80GB", "cpu-avx512-bf16"), or the driver's where the table has no row.
        kind: "cuda", "rocm", "mps" or "cpu".
        compute_capability: (major, minor) of a CUDA device, else None.
        native_bf16: bf16 arithmetic in hardware. A T4 that torch lets run bf16 by emulation is False.
        native_fp16: fp16 matrix units (CUDA sm70+); False on CPU, where loss-scaled fp16 training has no gain.
        tf32: TF32 matrix units (sm80+).
        flash_attention_2: FlashAttention-2 kernels run (sm80+); whether the package imports is `optional`'s question.
        flash_attention_3: FlashAttention-3 kernels run (sm90 exactly).
        sdpa_memory_efficient: torch SDPA has a fused kernel that never holds the length x length scores.
        fp8: fp8 matrix units (sm89+).
        memory_gib: device memory (host memory on CPU); None where not known.
        peak_tflops: dense peaks by "fp32", "tf32", "fp16", "bf16", "fp8"; a missing key is a number nobody published.
        num_cores: streaming multiprocessors on CUDA, usable cores on CPU; 1, the least, where not known.
        source: who says so.
        device_name: the driver's name of a live device; empty for a described one.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int] | None
    native_bf16: bool
    native_fp16: bool
    tf32: bool
    flash_attention_2: bool
    flash_attention_3: bool
    sdpa_memory_efficient: bool
    fp8: bool
    memory_gib: float | None
    num_cores: int
    source: str
    peak_tflops: dict[str, float] = dataclasses.field(default_factory=dict)
    device_name: str = ""


def cuda_card(
    name: str, sm: tuple[int, int], num_sms: int, memory_gib: float | None, source: str, **peak: float
) -> Hardware:
    """A CUDA device; all flags follow from the compute capability.

    Sources: fp16/bf16/tf32/fp8 units, CUDA guide and Transformer Engine support matrix; FlashAttention README;
    memory-efficient SDPA, torch aten/native/transformers/cuda/sdp_utils.cpp (sm50+).
    """
    return Hardware(
        name=name,
        kind="cuda",
        compute_capability=sm,
        native_bf16=sm >= (8, 0),
        native_fp16=sm >= (7, 0),
        tf32=sm >= (8, 0),
        flash_attention_2=sm >= (8, 0),
        flash_attention_3=sm == (9, 0),
        sdpa_memory_efficient=sm >= (5, 0),
        fp8=sm >= (8, 9),
        memory_gib=memory_gib,
        num_cores=num_sms,
        source=source,
        peak_tflops=peak,
    )


def plain_device(
    name: str, kind: str, source: str, *, bf16: bool = False, fp16: bool = False, fused_sdpa: bool
) -> Hardware:
    """A device without CUDA: everything that is not stated is a conservative no."""
    return Hardware(name, kind, None, bf16, fp16, False, False, False, fused_sdpa, False, None, 1, source)


# Row, and the names by which drivers know it (regular expression, whole name, "NVIDIA "/"Tesla " stripped, any case).
ROWS: tuple[tuple[Hardware, str], ...] = (
    (plain_device("cpu", "cpu", "torch CPU build; no bf16 instructions assumed", fused_sdpa=True), ""),
    (plain_device("cpu-avx512-bf16", "cpu", "Intel SDM: AVX512_BF16 (VDPBF16PS)", bf16=True, fused_sdpa=True), ""),
    (plain_device("cpu-amx-bf16", "cpu", "Intel SDM: AMX-BF16 (TDPBF16PS)", bf16=True, fused_sdpa=True), ""),
    (plain_device("mps", "mps", "Apple Metal Performance Shaders; conservative", fp16=True, fused_sdpa=False), ""),
    (cuda_card("P100", (6, 0), 56, 16, _P100, fp32=9.3), "P100-PCIE-16GB"),  # Kaggle's
    (cuda_card("P100-SXM2", (6, 0), 56, 16, _P100, fp32=10.6), "P100-SXM2-16GB"),
    (cuda_card("T4", (7, 5), 40, 16, _T4, fp32=8.1, fp16=65), "T4"),
    (cuda_card("V100-16GB", (7, 0), 80, 16, _V100, fp32=15.7, fp16=125), "V100-SXM2-16GB"),
    (cuda_card("V100-32GB", (7, 0), 80, 32, _V100, fp32=15.7, fp16=125), "V100-SXM[23]-32GB"),
    (cuda_card("V100-PCIe-16GB", (7, 0), 80, 16, _V100, fp32=14, fp16=112), "V100-PCIE-16GB"),
    (cuda_card("V100-PCIe-32GB", (7, 0), 80, 32, _V100, fp32=14, fp16=112), "V100-PCIE-32GB"),
    (
        cuda_card("A100-40GB", (8, 0), 108, 40, _A100, fp32=19.5, tf32=156, fp16=312, bf16=312),
        "A100-(SXM4|PCIE)-40GB",
    ),
    (
        cuda_card("A100-80GB", (8, 0), 108, 80, _A100, fp32=19.5, tf32=156, fp16=312, bf16=312),
        "A100-SXM4?-80GB|A100[ -]80GB[ -]PCIe",
    ),
    (cuda_card("A2", (8, 6), 10, 16, _A2, fp32=4.5, tf32=9, fp16=18, bf16=18), "A2"),
    (cuda_card("A10", (8, 6), 72, 24, _A10, fp32=31.2, tf32=62.5, fp16=125, bf16=125), "A10"),
    (cuda_card("A10G", (8, 6), 80, 24, _A10G, fp32=35, tf32=35, fp16=70, bf16=70), "A10G"),
    (cuda_card("A30", (8, 0), 56, 24, _A30, fp32=10.3, tf32=82, fp16=165, bf16=165), "A30"),
    (cuda_card("A40", (8, 6), 84, 48, _A40, fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7), "A40"),
    (cuda_card("RTX-A6000", (8, 6), 84, 48, _A6000, fp32=38.7, tf32=77.4, fp16=154.8, bf16=154.8), "RTX A6000"),
    (
        cuda_card("RTX-6000-Ada", (8, 9), 142, 48, _ADA_6000, fp32=91.1, tf32=182.1, fp16=364.2, bf16=364.2, fp8=728.5),
        "RTX 6000 Ada Generation",
    ),
    (cuda_card("L40", (8, 9), 142, 48, _L40, fp32=90.5, tf32=90.5, fp16=181.05, bf16=181.05, fp8=362), "L40"),
    (cuda_card("L40S", (8, 9), 142, 48, _L40S, fp32=91.6, tf32=183, fp16=362.05, bf16=362.05, fp8=733), "L40S"),
    (cuda_card("L4", (8, 9), 58, 24, _L4, fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5), "L4"),
    (
        cuda_card("H100-SXM", (9, 0), 132, 80, _H100, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
        "H100 80GB HBM3|H100-SXM5-80GB",
    ),
    (
        cuda_card("H100-PCIe", (9, 0), 114, 80, _H100, fp32=51, tf32=378, fp16=756.5, bf16=756.5, fp8=1513),
        "H100[ -]PCIe",
    ),
    (
        cuda_card("H100-NVL", (9, 0), 132, 94, _H100_NVL, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5),
        "H100 NVL",
    ),
    (
        cuda_card("GH200-96GB", (9, 0), 132, 96, _GH200, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
        "GH200 480GB",  # the memory in its name is that of the processor beside it
    ),
    (
        cuda_card("GH200-144GB", (9, 0), 132, 144, _GH200, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
        "GH200 144G HBM3e",
    ),
    (cuda_card("H200", (9, 0), 132, 141, _H200, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979), "H200"),
    (cuda_card("B200", (10, 0), 148, 180, _B200, fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500), "B200"),
    (cuda_card("RTX-PRO-6000", (12, 0), 188, 96, _PRO), "RTX PRO 6000 Blackwell (Workstation|Server) Edition"),
    (cuda_card("RTX-2060", (7, 5), 30, 6, _PRODUCT.format("RTX 2060"), fp32=6.5), "(GeForce )?RTX 2060"),
    (
        cuda_card("RTX-2060-SUPER", (7, 5), 34, 8, _PRODUCT.format("RTX 2060 SUPER"), fp32=7.2),
        "(GeForce )?RTX 2060 SUPER",
    ),
    (cuda_card("RTX-2070", (7, 5), 36, 8, _TURING, fp32=7.5, fp16=29.9), "(GeForce )?RTX 2070"),
    (
        cuda_card("RTX-2070-SUPER", (7, 5), 40, 8, _PRODUCT.format("RTX 2070 SUPER"), fp32=9.1),
        "(GeForce )?RTX 2070 SUPER",
    ),
    (cuda_card("RTX-2080", (7, 5), 46, 8, _TURING, fp32=10.1, fp16=40.3), "(GeForce )?RTX 2080"),
    (
        cuda_card("RTX-2080-SUPER", (7, 5), 48, 8, _PRODUCT.format("RTX 2080 SUPER"), fp32=11.2),
        "(GeForce )?RTX 2080 SUPER",
    ),
    (cuda_card("RTX-2080-Ti", (7, 5), 68, 11, _TURING, fp32=13.4, fp16=53.8), "(GeForce )?RTX 2080 Ti"),
    (cuda_card("RTX-3060", (8, 6), 28, 12, _PRODUCT.format("RTX 3060"), fp32=12.8), "(GeForce )?RTX 3060"),
    (cuda_card("RTX-3070", (8, 6), 46, 8, _GA102, fp32=20.3, tf32=20.3, fp16=40.6, bf16=40.6), "(GeForce )?RTX 3070"),
    (cuda_card("RTX-3080", (8, 6), 68, 10, _GA102, fp32=29.8, tf32=29.8, fp16=59.5, bf16=59.5), "(GeForce )?RTX 3080"),
    (cuda_card("RTX-3090", (8, 6), 82, 24, _GA102, fp32=35.6, tf32=35.6, fp16=71, bf16=71), "(GeForce )?RTX 3090"),
    (cuda_card("RTX-4060", (8, 9), 24, 8, _PRODUCT.format("RTX 4060"), fp32=15.1), "(GeForce )?RTX 4060"),
    (cuda_card("RTX-4070", (8, 9), 46, 12, _PRODUCT.format("RTX 4070"), fp32=29.2), "(GeForce )?RTX 4070"),
    (
        cuda_card("RTX-4080", (8, 9), 76, 16, _ADA, fp32=48.7, tf32=48.7, fp16=97.5, bf16=97.5, fp8=194.9),
        "(GeForce )?RTX 4080",
    ),
    (
        cuda_card("RTX-4090", (8, 9), 128, 24, _ADA, fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
        "(GeForce )?RTX 4090",
    ),
    (cuda_card("RTX-5070", (12, 0), 48, 12, _PRODUCT.format("RTX 5070"), fp32=30.8), "(GeForce )?RTX 5070"),
    (
        cuda_card("RTX-5080", (12, 0), 84, 16, _GB202, fp32=56.3, tf32=56.3, fp16=112.6, bf16=112.6, fp8=225.1),
        "(GeForce )?RTX 5080",
    ),
    (
        cuda_card("RTX-5090", (12, 0), 170, 32, _GB202, fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419),
        "(GeForce )?RTX 5090",
    ),
)

# A bare family name means the member with less memory, so that a plan made for it also fits the other; both H100 have
# the same memory and abilities, so there it is the common one.
ALIASES = {
    "a100": "A100-40GB",
    "v100": "V100-16GB",
    "h100": "H100-SXM",
    "h100-80gb": "H100-SXM",
    "gh200": "GH200-96GB",
    "a6000": "RTX-A6000",
}
