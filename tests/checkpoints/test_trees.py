"""Trees come back exactly as they were, types included; what cannot is refused by its place; no file runs code."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_trees import differences
from torch import nn

from hf_ext.checkpoints.format.trees import TENSOR_DTYPES, load_tree, save_tree, tree_bytes
from hf_ext.errors import CheckpointError


def round_trip(tree, folder: Path):
    save_tree(folder, "state", tree)
    return load_tree(folder, "state")


VALUES = {
    "str": 'Ünï \n \ud800 \x00 "',
    "empty_str": "",
    "int": -3,
    "int_over_64_bit": 2**63,
    "int_of_10000_digits": -(10**10_000),
    "float": 0.1,
    "smallest_float": 5e-324,
    "minus_zero": -0.0,
    "whole_float": 1e22,
    "nan": math.nan,
    "inf": math.inf,
    "minus_inf": -math.inf,
    "true": True,
    "none": None,
    "list": [1, [2.0, []], "3"],
    "tuple": (1, (), ("a", None)),
    "empty_dict": {},
    "dollar_keys": {"$tuple": [1], "$": 2, "a": 3},
    "dollar_later": {"a": 1, "$int": "0x1"},
    "keys": {1: "int", True + 1: "two", 2.5: "float", None: "none", (1, ("b", False)): "tuple", "s": "str"},
    "bool_keys": {False: 0, True: 1},
    "order": {"b": 1, "a": 2, "c": 3},
    "counter": Counter({20: 1, 10: 2}),
    "ordered_dict": OrderedDict([("b", 1), ("a", 2)]),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "zero_dim_array": np.array(2.5),
    "empty_array": np.zeros((0, 3), np.int8),
    "fortran_array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed_array": np.arange(4)[::-1],
    "numpy_float64": np.float64(0.1),
    "numpy_float32_nan": np.float32("nan"),
    "numpy_bool": np.True_,
    "numpy_int64": np.int64(-(2**63)),
    "numpy_complex128": np.complex128(1 - 2j),
    "zero_dim": torch.tensor(3),
    "empty": torch.empty(0, 3, dtype=torch.int16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10)[::3],
    "expanded": torch.tensor([7.0]).expand(3),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative_view": torch.tensor([1 + 2j]).conj().imag,
    "nan_tensor": torch.tensor([math.nan, math.inf, -0.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_the_same_bits_and_type(tmp_path, name):
    tree = {"value": VALUES[name]}
    assert differences(tree, round_trip(tree, tmp_path)) == []
    assert differences(VALUES[name], round_trip(VALUES[name], tmp_path)) == []  # as the root too


@pytest.mark.parametrize("dtype", sorted(TENSOR_DTYPES, key=str), ids=str)
def test_a_tensor_of_every_dtype_comes_back(tmp_path, dtype):
    values = torch.arange(48, dtype=torch.uint8)
    values = values % 2 if dtype == torch.bool else values
    tensor = values.view(dtype).reshape(2, 3, -1)
    tree = [tensor, tensor.new_empty(0), torch.empty((), dtype=dtype).copy_(tensor.flatten()[1])]
    assert differences(tree, round_trip(tree, tmp_path)) == []


def test_the_comparison_sees_what_it_should():
    one = {"a": (1, torch.tensor([1.0, -0.0])), "b": np.float32(1), "c": Counter([1]), "d": 1}
    twins = [
        {**one, "a": (1, torch.tensor([1.0, 0.0]))},
        {**one, "a": [1, one["a"][1]]},
        {**one, "a": (True, one["a"][1])},
        {**one, "a": (1, one["a"][1].double())},
        {**one, "b": 1.0},
        {**one, "c": {1: 1}},
        {**{k: one[k] for k in "bacd"}},
        {**one, "d": 1.0},
    ]
    assert [len(differences(one, twin)) for twin in [one, *twins]] == [0, *[1] * len(twins)]


def test_views_that_share_memory_come_back_as_copies_of_their_own(tmp_path):
    base = torch.arange(6.0)
    tree = {"base": base, "view": base[2:4], "again": base, "reshaped": base.view(2, 3), "array": base.numpy()[1:]}
    back = round_trip(tree, tmp_path)
    assert differences(tree, back) == []
    back["base"].zero_()
    assert back["view"].tolist() == [2.0, 3.0]
    assert back["again"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_loaded_tensors_do_not_hold_the_deleted_file(tmp_path):
    save_tree(tmp_path, "state", [torch.ones(100_000)])
    (tensor,) = load_tree(tmp_path, "state")
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    (tmp_path / "state.safetensors").write_bytes(b"")
    assert tensor.sum() == 100_000


def test_loaded_arrays_and_tensors_can_be_written_to(tmp_path):
    array, tensor = round_trip([np.zeros(2), torch.zeros(2)], tmp_path)
    array[0], tensor[0] = 1, 1
    assert (array.tolist(), tensor.tolist()) == ([1.0, 0.0], [1.0, 0.0])


def test_only_trees_with_tensors_write_safetensors(tmp_path):
    save_tree(tmp_path, "state", [torch.ones(2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.safetensors"]
    save_tree(tmp_path, "state", [1])
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert json.loads((tmp_path / "state.json").read_text()) == {"format": 1, "num_tensors": 0, "tree": [1]}


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), r"state\['a'\]\[1\] is a builtins.object"),
        ({1, 2}, "builtins.set"),
        (b"bytes", "builtins.bytes"),
        (1j, "builtins.complex"),
        (Name("x"), "Name"),
        (defaultdict(int), "defaultdict"),
        (len, "builtin_function"),
        (np.array(["text"]), "dtype <U4"),
        (np.array([None]), "dtype object"),
        (np.zeros(1, ">f4"), "dtype >f4"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(1, requires_grad=True), "requires gradients"),
        (torch.ones(1).to_sparse(), "sparse"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        ({b"k": 1}, r"state\['a'\]\[1\]\[b'k'\]: bytes keys"),
        ({(1, b"k"): 1}, "tuple keys"),
        ({torch.ones(1): 1}, "Tensor keys"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_its_place(tmp_path, value, says):
    with pytest.raises(CheckpointError, match=says):
        save_tree(tmp_path, "state", {"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_without_values_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="meta"):
        save_tree(tmp_path, "state", [torch.ones(1, device="meta")])


def test_a_tree_that_contains_itself_is_refused(tmp_path):
    tree: list = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contain itself"):
        save_tree(tmp_path, "state", tree)


@pytest.mark.parametrize(
    "node",
    [
        {"$object": "os.system"},
        {"$tensor": 5},
        {"$tensor": "x"},
        {"$tuple": 1},
        {"$scalar": ["object", "00"]},
        {"$scalar": ["float32", "00"]},
        {"$dtype": "__class__"},
        {"$int": "__import__('os')"},
        {"$dict": [[[1], 2]]},
        {"$dict": [1]},
        {"$int": "0x1", "more": 1},
        {"$int": 5},
    ],
    ids=str,
)
def test_entries_that_save_tree_does_not_write_are_refused(tmp_path, node):
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "num_tensors": 0, "tree": [node]}))
    with pytest.raises(CheckpointError, match=r"state\.json is no tree"):
        load_tree(tmp_path, "state")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tree"),
        ("[1]", "no tree"),
        ('{"format": 2, "num_tensors": 0, "tree": 1}', "format 2"),
        ('{"format": 1, "tree": 1}', "num_tensors"),
        ("[" * 100_000, "RecursionError"),
        ("\xff", "no tree"),
        ('{"format": 1, "num_tensors": 2, "tree": 1}', "holds 1 tensors"),
    ],
)
def test_a_damaged_json_file_is_refused(tmp_path, text, says):
    save_tree(tmp_path, "state", [torch.ones(2)])
    (tmp_path / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=says):
        load_tree(tmp_path, "state")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        load_tree(tmp_path, "state")
    save_tree(tmp_path, "state", [torch.ones(2)])
    values = tmp_path / "state.safetensors"
    content = values.read_bytes()
    for damaged in (b"", content[:-1], content[:20], b"\xff" * 8 + content[8:]):
        values.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be read"):
            load_tree(tmp_path, "state")
    values.unlink()
    with pytest.raises(CheckpointError, match=r"state\.safetensors is missing"):
        load_tree(tmp_path, "state")


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [torch.zeros(0)],
        [torch.zeros(1000, 1000), torch.zeros(3, dtype=torch.int8)],
        {str(i): torch.zeros([1] * (i % 7) + [i]) for i in range(200)},
        {"numbers": [10**i for i in range(300)], "text": "é" * 5000},
    ],
    ids=["empty", "empty tensor", "large", "many", "numbers"],
)
def test_tree_bytes_is_an_upper_bound_and_a_close_one(tmp_path, tree):
    save_tree(tmp_path, "state", tree)
    taken = allocated(tmp_path)
    assert taken <= tree_bytes(tree) <= 2 * taken + 3 * 8192


def test_tree_bytes_covers_the_numbers_that_grow(tmp_path):
    bound = tree_bytes({"step": [0] * 5000, "moment": torch.zeros(10_000)})
    save_tree(tmp_path, "state", {"step": [999] * 5000, "moment": torch.ones(10_000)})
    assert allocated(tmp_path) <= bound
