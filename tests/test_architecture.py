"""Imports go down the floors, in no circle; and nothing unpickles, evaluates or downloads code."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer

from hf_ext.trainer import FastTrainer

ROOT = Path(__file__).resolve().parent.parent
# Folders of hf_ext, bottom first: a module imports from its own folder and from those of lower floors. Files at the
# root stand where their imports put them.
FLOORS = (
    {"arguments", "labels", "processes", "text"},
    {"data", "reporting"},
    {"models"},
    {"memory"},
    {"embeddings", "evaluation"},
    {"checkpoints"},
    {"speedups", "hub"},
    {"training"},
    {"saving"},
    {"baselines", "tasks"},
    {"heads"},
    {"property", "masked_lm"},
    {"finished", "generation"},  # both read a trained model of a property
    {"comparing", "doctor"},
)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(root: Path, package: str) -> dict[str, set[str]]:
    """Module -> modules of `package` that it imports, wherever in the file the import stands."""
    files = {module_name(path, root): path for path in sorted((root / package).rglob("*.py"))}
    return {name: imported_modules(name, path, package, files) for name, path in files.items()}


def imported_modules(name: str, path: Path, package: str, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            names = [alias.name for alias in node.names if alias.name != "__version__"]  # the package's own
            targets = [f"{base}.{name}" if f"{base}.{name}" in known else base for name in names]
        else:
            continue
        found |= {target for target in targets if target.split(".")[0] == package}
    return found - {name}


def unit_of(module: str) -> str:
    """The folder, or the file at the root, that a module stands in; "" of the package itself."""
    return [*module.split("."), ""][1]


def upward_imports(imports: dict[str, set[str]], floors: tuple[set[str], ...]) -> list[str]:
    """Imports from a floor that is not below, as 'a -> b'."""
    height = {unit: i for i, floor in enumerate(floors) for unit in floor}
    pairs = [(module, target) for module, targets in imports.items() for target in targets]
    return sorted(
        f"{one} -> {other}"
        for one, other in pairs
        if (a := unit_of(one)) != (b := unit_of(other)) and {a, b} <= height.keys() and height[b] >= height[a]
    )


def deep_imports(root: Path, package: str) -> list[str]:
    """Imports of what stands inside another folder, past the names that its `__init__.py` offers, as 'a -> b'."""
    imports = read_imports(root, package)
    return sorted(
        f"{one} -> {other}"
        for one, others in imports.items()
        for other in others
        if other.count(".") > 1 and unit_of(one) != unit_of(other) and one != package
    )


def internal_names(path: Path) -> list[str]:
    """Names that a test file imports from inside a folder of hf_ext; modules of words are offered whole."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    inside = [node for node in nodes if re.match(r"hf_ext\.(?!text\.)\w+\.", node.module or "")]
    return [f"{node.module}.{alias.name}" for node in inside for alias in node.names]


def unmarked(folder: Path) -> list[str]:
    """Test files that do so without saying it by the mark `internals`."""
    found = [path for path in sorted(folder.rglob("test_*.py")) if internal_names(path)]
    return [path.name for path in found if not re.search(r"^pytestmark = .*mark\.internals", path.read_text(), re.M)]


def between_units(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same of folders and of files at the root: what imports what, itself left out."""
    found: dict[str, set[str]] = {}
    for module, targets in imports.items():
        found.setdefault(unit_of(module), set()).update(map(unit_of, targets))
    return {unit: targets - {unit, ""} for unit, targets in found.items() if unit}


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of one import cycle, or nothing."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        for target in sorted(imports.get(module, ())):
            if found := visit(target, [*trail, module]):
                return found
        done.add(module)
        return []

    return next((cycle for module in imports if (cycle := visit(module, []))), [])


def hidden_reads(root: Path, package: str) -> list[str]:
    """Reads of an attribute `_ext_*` in another file than the one whose class has it, as 'reader -> attribute'.

    No import shows that these files depend on each other.
    """
    found = []
    for path in sorted((root / package).rglob("*.py")):
        own, named = set(), set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own |= {name for child in node.body for name in names_in_class(child)}
            elif isinstance(node, ast.Attribute):
                is_set = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                (own if is_set else named).add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # of getattr, attrgetter
                named.update(re.findall(r"^_ext_\w+", node.value))
        found += [f"{module_name(path, root)} -> {name}" for name in sorted(named - own) if name.startswith("_ext_")]
    return found


def names_in_class(node: ast.stmt) -> list[str]:
    """What a statement in the body of a class defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


FOREIGN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def unsafe_lines(path: Path) -> list[str]:
    """Imports of pickle and its kin; calls of eval, exec, torch.save, unsafe torch.load; remote code let in."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            wrong += [(node.lineno, name) for name in names if name.split(".")[0] in FOREIGN]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in ("eval", "exec", "torch.save"):
                wrong.append((node.lineno, called))
            if called == "torch.load" and given.get("weights_only") != "True":
                wrong.append((node.lineno, called))
            if given.get("trust_remote_code", "False") != "False":
                wrong.append((node.lineno, "trust_remote_code"))
    return [f"{path.name}:{line} {what}" for line, what in wrong]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return read_imports(ROOT, "hf_ext")


def test_imports_of_hf_ext_go_down_the_floors(imports):
    assert len(imports) > 50  # the scan found the package
    assert upward_imports(imports, FLOORS) == []


def test_other_folders_import_what_a_folder_offers():
    texts = [path.stem for path in (ROOT / "hf_ext" / "text").glob("*.py")]  # modules of words, whole
    assert [one for one in deep_imports(ROOT, "hf_ext") if one.rpartition(".")[2] not in texts] == []


def test_tests_of_what_is_inside_a_folder_are_marked_and_get_fewer():
    assert unmarked(ROOT / "tests") == []
    assert sum(len(internal_names(path)) for path in (ROOT / "tests").rglob("*.py")) <= 211  # may only fall


def test_the_scan_sees_a_test_of_internals_without_the_mark(tmp_path):
    for name, text in (
        ("test_bare", "from hf_ext.memory.probe import Ledger, OTHER"),
        ("test_marked", "from hf_ext.memory.probe import Ledger\npytestmark = [pytest.mark.internals]"),
        ("test_outside", "from hf_ext.memory import MemoryModel\nfrom hf_ext.text.units import gib"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    assert unmarked(tmp_path) == ["test_bare.py"]
    assert internal_names(tmp_path / "test_bare.py") == ["hf_ext.memory.probe.Ledger", "hf_ext.memory.probe.OTHER"]


def test_no_module_hides_a_name_that_its_folder_offers():
    for face in sorted((ROOT / "hf_ext").glob("*/__init__.py")):
        imports = [node for node in ast.walk(ast.parse(face.read_text())) if isinstance(node, ast.ImportFrom)]
        offered = {alias.name for node in imports if node.level == 1 for alias in node.names}
        assert not offered & {path.stem for path in face.parent.iterdir()}, face


def test_every_folder_has_a_floor_and_the_root_is_a_page_long(imports):
    folders = {path.parent.name for path in (ROOT / "hf_ext").glob("*/__init__.py")}
    assert set().union(*FLOORS) == folders
    assert len(between_units(imports).keys() - folders) <= 13


def test_neither_modules_nor_folders_import_each_other_in_a_circle(imports):
    assert find_cycle(imports) == []
    assert find_cycle(between_units(imports)) == []


def test_hf_ext_never_imports_recipes(imports):
    for path in (ROOT / "hf_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(re.match(r"(hf_ext\.)?recipes\b", name) for name in names), path


def test_hf_ext_and_recipes_run_no_foreign_code():
    files = [*(ROOT / "hf_ext").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    files = [path for path in files if path.parent.name != "tests"]  # an example's, which run the code of a card
    assert [line for path in files for line in unsafe_lines(path)] == []


def write_package(root: Path, **files: str) -> dict[str, set[str]]:
    (root / "toy").mkdir()
    for name, text in {"__init__": "", **files}.items():
        (root / "toy" / f"{name}.py").write_text(text)
    return read_imports(root, "toy")


def test_the_scan_sees_an_upward_import(tmp_path):
    imports = write_package(tmp_path, low="def f():\n    from .high import g\n", high="g = 1\n")
    assert upward_imports(imports, ({"low"}, {"high"})) == ["toy.low -> toy.high"]
    assert upward_imports(imports, ({"high"}, {"low"})) == []


def test_the_scan_sees_an_import_past_a_face(tmp_path):
    (tmp_path / "toy" / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "room/__init__": "",
        "room/inner": "x = 1",
        "a": "from .room.inner import x",
    }.items():
        (tmp_path / "toy" / f"{name}.py").write_text(text)
    assert deep_imports(tmp_path, "toy") == ["toy.a -> toy.room.inner"]
    (tmp_path / "toy" / "a.py").write_text("from .room import x")
    assert deep_imports(tmp_path, "toy") == []


def test_the_scan_sees_a_sideways_import_and_a_cycle(tmp_path):
    imports = write_package(tmp_path, a="from . import b\n", b="from toy.c import x\n", c="from .a import y\n")
    assert upward_imports(imports, ({"a", "b"},)) == ["toy.a -> toy.b"]
    assert find_cycle(imports) == ["toy.a", "toy.b", "toy.c"]
    assert find_cycle(between_units({"toy.a.one": {"toy.b"}, "toy.b": {"toy.a.two"}})) == ["a", "b"]


def test_parts_are_given_what_they_need_and_reach_for_nothing_on_the_trainer():
    assert hidden_reads(ROOT, "hf_ext") == []


def test_the_scan_sees_a_read_that_no_import_shows(tmp_path):
    owner = "class T:\n    _ext_b = 1\n    def __init__(self):\n        self._ext_a = self._ext_b\n"
    reader = "def f(t):\n    t._ext_a = 2\n    return getattr(t, '_ext_b')\n"
    write_package(tmp_path, owner=owner, reader=reader)
    assert hidden_reads(tmp_path, "toy") == ["toy.reader -> _ext_a", "toy.reader -> _ext_b"]


def test_the_scan_sees_unsafe_code(tmp_path):
    for line, found in (
        ("import pickle", "pickle"),
        ("from joblib import load", "joblib"),
        ("eval('1')", "eval"),
        ("torch.load(p)", "torch.load"),
        ("f(trust_remote_code=True)", "trust_remote_code"),
        ("f(trust_remote_code=flag)", "trust_remote_code"),
    ):
        (tmp_path / "bad.py").write_text(f"x = 1\n{line}\n")
        assert unsafe_lines(tmp_path / "bad.py") == [f"bad.py:2 {found}"]


def test_the_scan_leaves_safe_code_alone(tmp_path):
    path = tmp_path / "good.py"
    path.write_text("model.eval()\nf(trust_remote_code=False)\ntorch.load(p, weights_only=True)\nimport json\n")
    assert unsafe_lines(path) == []


def test_each_seam_of_trainer_is_overridden_in_one_place():
    own = [base for base in FastTrainer.__mro__ if base.__module__.split(".")[0] == "hf_ext"]
    assert own == [FastTrainer]
    assert sum(inspect.isroutine(getattr(Trainer, name, None)) for name in vars(FastTrainer)) > 10


def test_types_are_ignored_or_left_open_in_few_places():
    text = "\n".join(path.read_text() for path in (ROOT / "hf_ext").rglob("*.py"))
    assert text.count("type: ignore") <= 30
    assert len(re.findall(r"\btrainer: Any\b", text)) <= 1
    assert len(re.findall(r": Any\b", text)) <= 575  # may only fall
