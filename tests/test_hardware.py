"""The hardware table, looked up by name and matched to what drivers say; no device has to be present."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hf_ext import hardware
from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware, detect_hardware, known_hardware

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """Makes torch report one CUDA card with the given driver name, capability, memory in GiB and SM count."""

    def plug_in(name: str, sm: tuple[int, int], memory_gib: float) -> None:
        properties = SimpleNamespace(total_memory=int(memory_gib * GIB), multi_processor_count=10, major=sm[0])
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "device": lambda index: contextlib.nullcontext(),
            "get_device_name": lambda index: name,
            "get_device_properties": lambda index: properties,
            "get_device_capability": lambda index: sm,
        }
        for function, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, function, fake)

    return plug_in


def test_what_each_device_can_do():
    for name, can in {
        "T4": (False, True, False, False),
        "A100-80GB": (True, True, True, True),
        "RTX-5090": (True, True, True, True),
        "cpu": (False, False, False, False),
        "cpu-avx512-bf16": (True, False, False, False),
        "cpu-amx-bf16": (True, False, False, False),
    }.items():
        row = describe_hardware(name)
        assert (row.native_bf16, row.native_fp16, row.tf32, row.flash_attention_2) == can, name


def test_names_are_found_in_any_spelling_and_a_family_is_its_smallest_card():
    for spelled, name in {
        "A100": "A100-40GB",
        "v100": "V100-16GB",
        "a100 80gb": "A100-80GB",
        "H100": "H100-SXM",
        "GH200": "GH200-96GB",
        "rtx_4090": "RTX-4090",
    }.items():
        assert describe_hardware(spelled).name == name


def test_names_are_known_by_rows_of_the_table_or_capabilities_and_others_are_refused():
    rows = [describe_hardware(name) for name in known_hardware()]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.source
        assert ("tf32" in row.peak_tflops) <= row.tf32, row.name
        assert ("bf16" in row.peak_tflops) <= row.native_bf16, row.name
    assert describe_hardware("sm_120").compute_capability == (12, 0)
    known = r"'A100-60GB'\. Did you mean 'A100-[48]0GB'\? Known: cpu, .*RTX-5090.*'sm86'"
    with pytest.raises(ArgumentError, match=known):
        describe_hardware("A100-60GB")


def test_a_live_card_is_recognised_by_its_driver_name(card):
    for driver, sm, memory_gib, name in (
        ("Tesla T4", (7, 5), 14.58, "T4"),
        ("Tesla V100-PCIE-32GB", (7, 0), 31.74, "V100-PCIe-32GB"),
        ("A100-SXM4-40GB", (8, 0), 39.59, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", (8, 0), 79.14, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 79.1, "H100-SXM"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.38, "RTX-6000-Ada"),
        ("GeForce RTX 2080 Ti", (7, 5), 10.75, "RTX-2080-Ti"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 31.35, "RTX-5090"),
    ):
        card(driver, sm, memory_gib)
        found = detect_hardware()
        assert (found.name, found.device_name) == (name, driver)
        assert found.memory_gib == pytest.approx(memory_gib, abs=0.01)
        assert found.peak_tflops == describe_hardware(name).peak_tflops
        assert found.native_bf16 == (sm >= (8, 0))


def test_a_variant_gets_its_capability_but_never_the_peaks_of_the_card_it_is_named_after(card):
    for driver, sm, memory_gib in (
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 15.99),
        ("NVIDIA GeForce RTX 3080", (8, 6), 12.0),  # the 12 GB card has more SMs than the table's 10 GB one
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), 9.5),
        ("NVIDIA RTX 6000", (7, 5), 23.6),
        ("NVIDIA H200 NVL", (9, 0), 139.8),
    ):
        card(driver, sm, memory_gib)
        found = detect_hardware()
        assert (found.name, found.peak_tflops, found.compute_capability) == (driver, {}, sm)
        assert found.flash_attention_2 == (sm >= (8, 0))
        assert found.memory_gib == pytest.approx(memory_gib, abs=0.01)
        assert "not in the table" in found.source


def test_a_t4_is_never_credited_with_the_bf16_that_torch_emulates(card, monkeypatch):
    card("Tesla T4", (7, 5), 14.58)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=int(14.58 * GIB), multi_processor_count=40, major=7),
    )
    assert torch.cuda.is_bf16_supported(including_emulation=True)
    assert (detect_hardware().name, detect_hardware().native_bf16) == ("T4", False)


def test_an_amd_card_is_not_judged_by_nvidia_capabilities(card, monkeypatch):
    card("AMD Instinct MI300X", (9, 4), 191.98)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = detect_hardware()
    can = (found.kind, found.compute_capability, found.flash_attention_2, found.native_bf16)
    assert can == ("rocm", None, False, True)


def test_the_cpu_is_recognised_by_its_instruction_flags(tmp_path, monkeypatch):
    for flags, name, bf16 in (
        ("fpu avx2 avx512f", "cpu", False),
        ("fpu avx512f avx512_bf16", "cpu-avx512-bf16", True),
        ("fpu avx512_bf16 amx_bf16 amx_tile", "cpu-amx-bf16", True),
    ):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n", encoding="ascii")
        monkeypatch.setattr(hardware, "CPUINFO", cpuinfo)
        found = detect_hardware("cpu")
        assert (found.name, found.native_bf16, found.kind) == (name, bf16, "cpu")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "missing")
    assert detect_hardware("cpu").name == "cpu"


def test_this_machine_is_detected_and_a_device_that_is_not_here_is_refused():
    found = detect_hardware()
    assert found.kind == ("cuda" if torch.cuda.is_available() else found.kind)
    assert found.memory_gib is None or found.memory_gib > 0
    for device in ("cuda:7", "xpu", "quantum"):
        with pytest.raises(ArgumentError, match=device):
            detect_hardware(device)


@pytest.mark.parametrize(
    ("limit", "has_bf16"),
    [("AVX512_CORE", False), ("avx2", False), ("AVX512_CORE_BF16", True), ("AVX10_1_512_AMX", True), ("", True)],
)
def test_a_limit_on_instructions_of_onednn_takes_bf16_away(monkeypatch, limit, has_bf16):
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert hardware.detect_hardware("cpu").native_bf16 == has_bf16
