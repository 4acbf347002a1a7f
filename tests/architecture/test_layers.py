"""The house's walls: who may import whom, how large things may grow, what may never be written."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "flatout"
SOURCES = sorted(ROOT.rglob("*.py"))

# package -> packages of ours it may import (errors is open to all but kernels, which know nothing of ours)
MAY_IMPORT = {
    "cli": {"bench", "config", "data", "plan", "models", "parallel", "train", "track", "demo", "launch"},
    "bench": {"config", "data", "models", "parallel", "train"},
    "demo": {"config", "data", "plan", "models", "train", "track"},
    "train": {"config", "data", "plan", "models", "parallel", "track"},
    "models": {"config", "kernels"},
    "parallel": {"config"},
    "launch": {"config"},
    "data": {"config"},
    "plan": {"config"},
    "kernels": set(),
    "track": {"config"},
    "config": set(),
    "errors": set(),
}
WITHOUT_TORCH = {"config", "data", "plan", "track", "errors", "launch"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Every import, lazy and TYPE_CHECKING ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""
            if node.module == "flatout":
                yield from (f"flatout.{alias.name}" for alias in node.names)


def test_every_import_obeys_the_layer_table() -> None:
    wrong = []
    for path, tree in trees():
        package = package_of(path)
        if package not in MAY_IMPORT:
            continue
        for module in imported_modules(tree):
            parts = module.split(".")
            if parts[0] != "flatout" or len(parts) == 1:
                continue
            allowed = MAY_IMPORT[package] | {package} | (set() if package == "kernels" else {"errors"})
            if parts[1] not in allowed | {"__version__"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_package_has_a_row_in_the_layer_table() -> None:
    packages = {package_of(path) for path in SOURCES}
    assert packages - {"__init__", "__main__"} == set(MAY_IMPORT)


def test_verbs_are_imported_by_nobody_but_the_front_door() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path, tree in trees()
        if package_of(path) != "cli" and path.name != "__main__.py"
        for module in imported_modules(tree)
        if module.startswith("flatout.cli")
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_light_packages_never_import_torch(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path, tree in trees()
        if package_of(path) == package
        for module in imported_modules(tree)
        if module.split(".")[0] in {"torch", "accelerate", "peft"}
    ]
    assert not wrong


def test_no_file_outgrows_the_house() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long, "split the file; the budget is a design tool"


def test_no_function_outgrows_a_page() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def test_no_code_from_text_and_no_pickle() -> None:
    banned_calls = {"exec", "eval", "compile", "__import__"}
    banned_modules = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    wrong = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in banned_calls:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
            is_switch = isinstance(node, ast.keyword) and node.arg in {"shell", "trust_remote_code", "allow_pickle"}
            if is_switch and not (isinstance(node.value, ast.Constant) and node.value.value is False):
                wrong.append(f"{path.relative_to(ROOT)}:{node.value.lineno} sets {node.arg}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save", "os.system"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}")
        wrong += [f"{path.relative_to(ROOT)} imports {m}" for m in imported_modules(tree) if m in banned_modules]
    assert not wrong


def test_the_environment_is_read_in_one_file() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.putenv"}
    }
    assert readers <= {"parallel/rank.py"}


def test_nothing_of_another_library_is_assigned_to() -> None:
    """No monkey-patching: `module.attribute = ...` where `module` was imported from elsewhere."""
    wrong = []
    for path, tree in trees():
        foreign = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.name.startswith("flatout")
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in foreign:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(target)}")
    assert not wrong


def test_no_vague_module_names() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
    assert not [path for path in SOURCES if path.stem in vague or path.parent.name in vague]
