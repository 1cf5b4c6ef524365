"""bf16 on a CPU is taken where its products are the faster ones: with AMX, or on AMD's."""

import pytest
from tiny_masked_lm import make_trainer

from hf_ext.hardware import is_amd_cpu

WITH, WITHOUT = {"avx512_bf16", "amx_bf16"}, {"avx512_bf16"}


@pytest.mark.parametrize(
    ("flags", "is_amd", "status"), [(WITH, False, "applied"), (WITHOUT, True, "applied"), (WITHOUT, False, "skipped")]
)
def test_a_cpu_that_lists_bf16_is_fast_in_it_with_amx_or_of_amd(tmp_path, monkeypatch, flags, is_amd, status):
    monkeypatch.setattr("hf_ext.hardware._cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: is_amd)
    trainer = make_trainer(tmp_path / "chosen", speedups=["precision"])
    assert trainer.plan["precision"].status == status
    assert trainer.args.bf16 == (status == "applied")
    if status == "skipped":
        assert "products in bf16 are slower there" in trainer.plan["precision"].reason
    assert make_trainer(tmp_path / "asked for", speedups=["precision"], bf16=True).args.bf16


@pytest.mark.parametrize(("maker", "is_amd"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_the_system_says_who_made_the_cpu(tmp_path, maker, is_amd):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    assert is_amd_cpu(tmp_path / "cpuinfo") == is_amd
    assert not is_amd_cpu(tmp_path / "none")
