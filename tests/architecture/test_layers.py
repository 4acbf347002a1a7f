"""The house's walls: who may import whom, how large things may grow, what may never be written."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flatout

ROOT = Path(__file__).parents[2] / "flatout"
MIGRATE = ROOT.parent / "migrate"
SOURCES = sorted(ROOT.rglob("*.py"))

# package -> packages of ours it may import, besides errors, environment and io
_BELOW_TRAIN = {"config", "data", "planner", "models", "objectives", "optim", "parallel", "checkpoint"}
_BELOW_TRAIN |= {"rollout", "track"}
_VERBS = {"demo", "doctor", "eval", "profile", "studio", "verifier"}
MAY_IMPORT = {
    "cli": _BELOW_TRAIN | _VERBS | {"api", "export", "launch", "trainer", "view"},
    "api": _BELOW_TRAIN | {"export", "launch", "trainer", "verifier", "view"},
    "export": {"checkpoint", "data", "models", "track", "view"},
    "compat": set(),
    "eval": {"config", "data", "models", "rollout", "track"},
    "studio": {"api", "view"},
    "demo": _BELOW_TRAIN | {"trainer"},
    "verifier": _BELOW_TRAIN | {"trainer"},
    "doctor": _BELOW_TRAIN | {"trainer"},
    "profile": _BELOW_TRAIN | {"trainer"},
    "trainer": _BELOW_TRAIN,
    "rollout": {"config", "data", "models", "optim", "planner"},
    "checkpoint": {"config", "optim", "parallel", "track"},
    "models": {"config", "kernels", "objectives"},
    "objectives": {"config"},
    "optim": {"config", "kernels"},
    "parallel": {"config", "planner"},
    "launch": {"config"},
    "data": {"config"},
    "planner": {"config"},
    "track": {"config"},
    "view": {"config", "data", "planner", "track"},
    "config": set(),
    "kernels": set(),
    "io": set(),
    "errors": set(),
    "environment": set(),
}
OPEN_TO_ALL = {"errors", "environment", "io"}
CLOSED = {"kernels", "errors"}  # these know nothing of ours
WITHOUT_TORCH = {"config", "data", "planner", "track", "errors", "launch", "io", "environment", "view"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The whole syntax of a file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def last_name(node: ast.AST) -> str:
    """Of what is called or read, the name behind the last dot."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported_modules(path: Path) -> Iterator[str]:
    """Every import, lazy and TYPE_CHECKING ones too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""
            if node.module == "flatout":
                yield from (f"flatout.{alias.name}" for alias in node.names)


def test_every_import_obeys_the_layer_table():
    wrong = []
    for path in SOURCES:
        package = package_of(path)
        if package not in MAY_IMPORT:
            continue
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "flatout" or len(parts) == 1:
                continue
            allowed = MAY_IMPORT[package] | {package} | (set() if package in CLOSED else OPEN_TO_ALL)
            if parts[1] not in allowed | {"__version__"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_migration_stands_on_the_public_api_alone():
    """migrate/ is a distribution of its own: of ours, it imports `flatout` and `flatout.api`."""
    wrong = [
        f"{path.relative_to(MIGRATE)} imports {module}"
        for path in sorted((MIGRATE / "flatout_migrate").rglob("*.py"))
        for module in imported_modules(path)
        if module.split(".")[0] == "flatout"
        and module.split(".")[1:2] not in ([], ["api"])
        and module.removeprefix("flatout.") not in flatout._MODULE_OF
    ]
    assert not wrong


def test_every_package_has_a_row_in_the_layer_table():
    packages = {package_of(path) for path in SOURCES}
    assert packages - {"__init__", "__main__"} == set(MAY_IMPORT)


def test_verbs_are_imported_by_nobody():
    wrong = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if package_of(path) != "cli" and path.name != "__main__.py"
        for module in imported_modules(path)
        if module.startswith("flatout.cli")
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_light_packages_never_import_torch(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in SOURCES
        if package_of(path) == package
        for module in imported_modules(path)
        if module.split(".")[0] in {"torch", "accelerate", "peft"}
    ]
    assert not wrong


def test_no_file_outgrows_the_house():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long, "split the file; the budget is a design tool"


def test_no_function_outgrows_a_page():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def test_no_code_from_text_and_no_pickle():
    banned_calls = {"exec", "eval", "compile", "__import__"}
    banned_modules = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    wrong = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in banned_calls:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
            is_switch = isinstance(node, ast.keyword) and node.arg in {"shell", "trust_remote_code", "allow_pickle"}
            if is_switch and not (isinstance(node.value, ast.Constant) and node.value.value is False):
                wrong.append(f"{path.relative_to(ROOT)}:{node.value.lineno} sets {node.arg}")
            is_banned = isinstance(node, ast.Attribute) and node.attr in {"load", "save", "system"}
            if is_banned and ast.unparse(node) in {"torch.load", "torch.save", "os.system"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}")
        wrong += [f"{path.relative_to(ROOT)} imports {m}" for m in imported_modules(path) if m in banned_modules]
    assert not wrong


def test_the_environment_is_read_in_one_file():
    readers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in nodes(path)
        if last_name(node) in {"environ", "getenv", "putenv"} and ast.unparse(node)[:3] == "os."
    }
    assert readers <= {"environment.py"}


# files that write by themselves, and why they may
WRITERS = {
    "api/inputs.py": "the folder is synced when it is whole",
    "checkpoint/mirror.py": "an object store",
    "data/pictures/processor.py": "its own save_pretrained, whose caller syncs the folder",
    "demo/write.py": "the folder is synced when it is whole",
    "models/lora/adapter.py": "the folder is synced when it is whole",
    "models/export.py": "the folder is synced when it is whole",
    "trainer/run.py": "the folder is synced when it is whole",
    "verifier/compare.py": "a temporary folder",
}


def test_what_must_survive_a_crash_is_written_by_one_door():
    """Durable writes sync, rename and follow no link; a plain write in another room does not."""
    writers = set()
    plain = {"write_text", "write_bytes", "save_file", "save_pretrained", "rename", "tofile"}
    for path in SOURCES:
        for node in nodes(path) if package_of(path) != "io" else ():
            if not isinstance(node, ast.Call) or last_name(node.func) not in {"open", "replace", *plain}:
                continue
            name = ast.unparse(node.func)
            constants = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            opens = name.rpartition(".")[2] == "open" and any(
                isinstance(mode, str) and len(mode) < 4 and set(mode) & set("wax+") for mode in constants
            )
            is_plain = name.rpartition(".")[2] in plain and "durable" not in name.lower()
            if opens or is_plain or name == "os.replace":
                writers.add(str(path.relative_to(ROOT)))
    assert writers == set(WRITERS)


def test_nothing_of_another_library_is_assigned_to():
    """No monkey-patching: `module.attribute = ...` where `module` was imported from elsewhere."""
    wrong = []
    for path in SOURCES:
        foreign = {
            alias.asname or alias.name.split(".")[0]
            for node in nodes(path)
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.name.startswith("flatout")
        }
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_foreign = isinstance(root, ast.Name) and root.id in foreign
                # excepthook is there to be assigned to
                if isinstance(target, ast.Attribute) and is_foreign and ast.unparse(target) != "sys.excepthook":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(target)}")
    assert not wrong


def test_no_vague_module_names():
    vague = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
    assert not [path for path in SOURCES if path.stem in vague or path.parent.name in vague]


# waits without a bound of their own, and what ends or bounds them
WAITS = {
    "api/start.py: self.join": "callbacks of the user, after the run",
    "checkpoint/write_async.py: self._reserving.join": "a thread of this process that takes memory",
    "checkpoint/write_async.py: copying.wait": "a copy to this process's memory",
    "checkpoint/write_async.py: self._thread.join": "this process's disk; over ranks faults.long_phase_s",
    "checkpoint/write_async.py: self.wait": "the same",
    "data/workers.py: first.wait": "a process that ends when its pipe is closed",
    "data/workers.py: waiting[0][1].result": "workers, each row of which has a time limit",
    "export/write.py: subprocess.run": "a program of llama.cpp, which shows what it does",
    "parallel/process_group.py: self._met.result": "a future that is done",
    "launch/supervise.py: process.wait": "a process that was killed",
    "launch/tmux.py: subprocess.run": "tmux, which answers at once",
    "parallel/strategies/buckets.py: work.wait": "other ranks; faults.stall_s",
    "studio/jobs.py: process.wait": "a process that closed its output",
    "studio/jobs.py: self._changed.wait": "wait_for bounds it",
    "studio/jobs.py: self._process.wait": "a process that was killed",
    "trainer/load.py: importing.join": "an import in this process",
    "trainer/batch_loader.py: future.result": "this process's disk; over ranks faults.stall_s",
    "trainer/picture_inputs.py: made.result": "threads of this process, on pictures that the build has read",
    "trainer/resume.py: run.saver.wait": "as write_async's",
    "verifier/ranks.py: process.wait": "a process that was killed",
}


def test_waits_without_a_bound_are_known():
    """Calls of `wait`, `join`, `result` or `get` without arguments may wait for ever, as may programs."""
    found = set()
    waits, programs = {"wait", "join", "result", "get"}, {"run", "check_output"}
    for path in SOURCES:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or last_name(node.func) not in waits | programs:
                continue
            name = ast.unparse(node.func)
            is_wait = last_name(node.func) in waits and not node.args + node.keywords
            is_program = name in {"subprocess.run", "subprocess.check_output"}
            if is_wait or (is_program and "timeout" not in {keyword.arg for keyword in node.keywords}):
                found.add(f"{path.relative_to(ROOT)}: {name}")
    assert found == set(WAITS), "bound it by a setting (io.bounded_wait), or say what ends it"
