"""Flash attention 3 and 4 by torch's own switch: where a package imports, on the right card, and only if proven.

Their kernels need a GPU. Here packages are stand-ins, and `varlen` computes by another kernel that asks torch which
version is switched on.
"""

import importlib
import sys
from types import ModuleType

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args, make_rows
from token_rows import pad_rows
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from hf_ext.hardware import describe_hardware
from hf_ext.models import attention as kernels
from hf_ext.models.newer_flash import HELD_FLASH, VERSIONS, find_newer_flash
from hf_ext.optional import import_problem
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, attention
from hf_ext.trainer import FastTrainer

OTHERS = ["cpu_matmul", "tf32", "fused_gelu", "masked_lm_head", "data_loading", "compile"]


class Handle:
    def remove(self):
        pass


@pytest.fixture
def install(monkeypatch):
    """Installs a stand-in for the package of a version."""

    def install(name):
        parts = VERSIONS[name][0].split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, Handle)
        import_problem.cache_clear()

    yield install
    import_problem.cache_clear()
    if torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("installed", "hardware", "found"),
    [
        ([], "H100", None),
        (["FA3"], "H100", "FA3"),
        (["FA4"], "H100", "FA4"),
        (["FA3", "FA4"], "H200", "FA3"),
        (["FA3", "FA4"], "B200", "FA4"),
        (["FA3"], "B200", None),
        (["FA3", "FA4"], "A100", None),
        (["FA3", "FA4"], "RTX-5090", None),
        (["FA3", "FA4"], "T4", None),
        (["FA3", "FA4"], "cpu", None),
    ],
)
def test_a_version_is_found_where_its_package_imports_on_a_card_it_was_made_for(install, installed, hardware, found):
    for name in installed:
        install(name)
    assert find_newer_flash(describe_hardware(hardware)) == found


def test_a_torch_without_the_switch_finds_none(install, monkeypatch):
    install("FA3")
    monkeypatch.delattr(torch_attention, "list_flash_attention_impls")
    assert find_newer_flash(describe_hardware("H100")) is None


def test_switching_on_returns_to_what_was_on_before(install):
    install("FA3"), install("FA4")
    first = HELD_FLASH.hold("FA3")
    second = HELD_FLASH.hold("FA4")
    assert torch_attention.current_flash_attention_impl() == "FA4"
    second()
    assert torch_attention.current_flash_attention_impl() == "FA3"
    first()
    assert torch_attention.current_flash_attention_impl() is None


def test_only_varlen_takes_it_and_the_decision_names_it(install):
    install("FA3")
    for asked, expected in (("auto", {"flash": "FA3"}), ("varlen", {"flash": "FA3"}), ("padded", {})):
        args = make_args(speedups=["all"], attention=asked, bf16=True)
        decision = attention.decide(Context(describe_hardware("H100"), args, ModelFacts(("esm",))))
        assert {name: value for name, value in decision.settings.items() if name == "flash"} == expected


def trained_on_a_described_h100(folder, monkeypatch, error_of_newer=0.0):
    """A run whose `varlen` is `padded`, with something added where a newer version is switched on."""

    def varlen(*given):
        newer = torch_attention.current_flash_attention_impl()
        return kernels.padded_attention(*given) + (error_of_newer if newer else 0.0)

    monkeypatch.setitem(kernels.KERNELS, "varlen", varlen)
    model, rows = make_wide_esm(), make_rows()
    args = make_args(folder, speedups=["all"], without=OTHERS, bf16=True)
    plan = make_plan(args, model, rows, pad_rows, describe_hardware("H100"))
    return FastTrainer(model, args, pad_rows, rows, plan=plan)


def test_one_that_agrees_is_used_and_switched_off_at_the_end(install, monkeypatch, tmp_path):
    install("FA3")
    trainer = trained_on_a_described_h100(tmp_path, monkeypatch)
    assert trainer.plan["attention"].evidence["flash"] == "FA3"
    assert torch_attention.current_flash_attention_impl() == "FA3"
    trainer.train()
    trainer.end()
    assert torch_attention.current_flash_attention_impl() is None


def test_one_that_computes_something_else_is_not_used_and_torchs_own_is(install, monkeypatch, tmp_path):
    install("FA3")
    trainer = trained_on_a_described_h100(tmp_path, monkeypatch, error_of_newer=0.5)
    decision = trainer.plan["attention"]
    assert (decision.status, decision.evidence["kernel"]) == ("applied", "varlen")
    assert decision.evidence["flash"].startswith("FA2; FA3 against it: ")
    assert torch_attention.current_flash_attention_impl() is None
    trainer.end()


def test_one_whose_package_has_no_kernels_is_not_used(install, monkeypatch, tmp_path):
    install("FA3")

    def register():
        raise RuntimeError("Module 'flash_attn_interface' does not expose FA3 kernels")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    trainer = trained_on_a_described_h100(tmp_path, monkeypatch)
    assert "does not expose FA3 kernels" in trainer.plan["attention"].evidence["flash"]
    trainer.end()


def test_flash_attn_of_the_hub_serves_where_kernels_imports_in_a_version_that_transformers_takes(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    import_problem.cache_clear()
    context = Context(
        describe_hardware("A100"), make_args(attention="flash_attention_2", bf16=True), ModelFacts(("esm",))
    )
    assert attention.decide(context).reason.endswith("flash_attn: is not installed: use --attention auto")
    monkeypatch.setitem(sys.modules, "kernels", ModuleType("kernels"))
    import_problem.cache_clear()
    for available, status in ((False, "refused"), (True, "applied")):  # an old version imports too
        monkeypatch.setattr(attention, "is_kernels_available", lambda available=available: available)
        assert attention.decide(context).status == status
    monkeypatch.setitem(sys.modules, "kernels", None)
    import_problem.cache_clear()
    assert attention.decide(context).status == "refused"
    importlib.invalidate_caches()
    import_problem.cache_clear()
