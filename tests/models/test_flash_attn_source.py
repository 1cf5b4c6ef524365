"""The stand-in of flash-attn, on which tests run faesm and our kernel, against flash-attn's own source: no GPU needed.

It is found where flash-attn is installed, or in FLASH_ATTN_SOURCE, the unpacked archive (`.ci/nightly` fetches it).
"""

import ast
import importlib.util
import os
from pathlib import Path

import flash_attn_reference
import pytest
import torch
from flash_attn_reference import CONTENTS, pad_input, unpad_input


def find_source() -> Path | None:
    """The folder `flash_attn`; flash-attn is not imported for it, which takes a GPU."""
    if folder := os.environ.get("FLASH_ATTN_SOURCE"):
        return Path(folder, "flash_attn")
    spec = importlib.util.find_spec("flash_attn")
    return None if spec is None else Path(spec.origin).parent


SOURCE = find_source()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(SOURCE is None, reason="flash-attn's source is not here: .ci/nightly fetches it"),
]


def read_module(path: Path) -> dict[str, str | None]:
    """Name -> parameters with their defaults, without types, of each function; None of what is imported."""
    found: dict[str, str | None] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name: None for name in node.names}
        elif isinstance(node, ast.FunctionDef):
            for parameter in node.args.args:
                parameter.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def test_it_has_what_faesm_imports_with_flash_attns_own_parameters_and_defaults():
    ours, compared = read_module(Path(flash_attn_reference.__file__)), []
    for module, names in CONTENTS.items():
        path = SOURCE.parent.joinpath(*module.split("."))
        theirs = read_module(path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py")
        assert names.keys() <= theirs.keys(), module
        if module == "flash_attn":  # which only imports them
            theirs = read_module(path / "flash_attn_interface.py")
        compared += [name for name, function in names.items() if function is not None]
        assert [ours[name] for name in names if names[name]] == [theirs[name] for name in names if names[name]]
    functions = ["flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func"]
    assert compared == [*functions, "pad_input", "unpad_input", "apply_rotary"]


def test_it_takes_padding_out_and_puts_it_back_as_flash_attn_does():
    spec = importlib.util.spec_from_file_location("their_padding", SOURCE / "bert_padding.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    states, mask = (
        torch.arange(24.0).view(2, 4, 3),
        torch.tensor([[True, True, False, True], [False, True, False, False]]),
    )
    found, wanted = unpad_input(states, mask), theirs.unpad_input(states, mask)
    for ours, real in zip(found, wanted, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(real))
    assert found[2].tolist() == [0, 3, 4]
    assert torch.equal(pad_input(found[0], found[1], 2, 4), theirs.pad_input(found[0], found[1], 2, 4))
