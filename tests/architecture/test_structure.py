"""What a reader may count on: no circles, nothing that only tests use, the field's words, and a size that shrinks."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flatout.cli.verbs import VERBS
from flatout.config.model import ADAPTER_STARTS
from flatout.config.objective import OBJECTIVES
from flatout.config.optim import OPTIMIZERS
from flatout.config.parallel import STRATEGIES
from flatout.track.trackers import TRACKERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flatout"

# definitions that only tests use today, and the room that deletes or uses them
KNOWN_UNUSED = {"flatout/data/rows/remote.py: _fetch_range": "fsspec calls it"}
# names of our own making, and the field's word in their place
WORDS = {
    "JoinedLora": "FusedLora", "join_layers": "fuse_layers",
    "Spread": "ParallelLayout", "spread_of": "resolve_layout",
    "choose_spread": "choose_parallel_layout", "Storage": "DurableIO", "Messages": "ControlGroup",
    "hold_back": "set_found_inf", "let_go": "clear_found_inf", "ladder": "size_buckets", "rungs": "size_buckets",
    "num_borders": "num_boundaries", "borders": "boundaries", "ledger": "build_report", "LeanAdamW": "AdamW8bit",
    "Door": "PeerListener", "knock": "connect_to_peer", "Watch": "PeerWatch", "Mark": "RankStatus",
    "Hub": "Heartbeats", "Spoke": "Heartbeats", "CURABLE": "RESTARTABLE", "is_curable": "is_restartable",
    "Family": "ArchShape", "FAMILIES": "archs",
    "frees_weights": "reshard_after_forward", "KeepsState": "PartitionedOptimizer",
    "laid_out": "with_layout", "cut_again": "resplit", "FrozenProduct": "FrozenMatmul",
    "useful_tok_s": "tokens_per_s", "room_of": "category_of",
    "found": "what it holds: match, findings, digest_now", "told": "what it holds: line, settings, report_token",
}  # fmt: skip
MODULES = {
    "joined": "fused", "spread": "layout", "storage": "durable_io", "stored": "read", "store": "token_store",
    "messages": "control_group", "alike": "rank_consistency", "ahead": "update", "place": "launch_mode",
    "ledger": "build_report", "draw": "sampling", "families": "archs", "pack": "bin_pack", "graphs": "cuda_graphs",
}  # fmt: skip
# methods that torch and transformers call, and the name of a function that only a decorator uses
HOOKS = {
    "_repr_html_",
    "_render_traceback_",
    "extra_repr",
    "get_mask_sizes",
    "get_seq_length",
    "on_finalized_text",
    "_",
}
HOOKS |= {"get_data", "get_filename", "get_source"}
# the median function has this many lines: neither crumbs nor scrolls
LEAST_MEDIAN_LINES, MOST_MEDIAN_LINES = 8, 16

# functions with more parameters than a reader keeps in mind; lower the number when one has become narrower
MOST_PARAMETERS, MAX_WIDE_FUNCTIONS = 7, 9

# lines of flatout/, and of each package to the next 500; who raises one writes why in docs/architecture.md
MAX_LINES = 65_300
MAX_PACKAGE_LINES = {
    "__init__": 500,
    "__main__": 500,
    "api": 2_000,
    "checkpoint": 2_000,
    "cli": 3_000,
    "compat": 500,
    "config": 4_000,
    "data": 11_500,
    "demo": 1_000,
    "doctor": 500,
    "environment": 500,
    "errors": 500,
    "eval": 500,
    "export": 1_000,
    "io": 2_500,
    "kernels": 4_000,
    "launch": 1_500,
    "models": 9_500,
    "objectives": 1_500,
    "optim": 1_000,
    "parallel": 2_000,
    "planner": 4_000,
    "profile": 500,
    "rollout": 3_000,
    "studio": 1_500,
    "track": 3_000,
    "trainer": 8_000,
    "verifier": 1_500,
    "view": 1_500,
}


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees of the package by path below the repository."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(trees()[path]))


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports() -> dict[str, set[str]]:
    """Modules of ours that each module imports, in functions and for type checks too."""
    modules = {module_of(path) for path in trees()}
    found: dict[str, set[str]] = defaultdict(set)
    for path in trees():
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module or "" for name in full]
            found[module_of(path)] |= modules.intersection(names) - {module_of(path)}
    return found


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_circle_between_files():
    edges = imports()
    # the package's own file imports nothing when it is imported: its names are loaded on first use
    edges["flatout"] = set()
    below = {module: reachable(module, edges) for module in edges}
    circles = {
        frozenset({module, *(other for other in below[module] if module in below[other])})
        for module in edges
        if module in below[module]
    }
    assert not circles


def definitions(path: str) -> Iterator[str]:
    """Functions, methods, classes and constants, without what libraries call: dunders, validators, their hooks."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            called_by_pydantic = any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not (called_by_pydantic or node.name.startswith("__") or node.name in HOOKS):
                yield node.name
    for statement in trees()[path].body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id[:2] != "__")


def uses() -> Counter[str]:
    """How often each name is read, called, imported or passed in the package and its scripts, texts aside."""
    found: Counter[str] = Counter()
    files = [
        path
        for folder in ("benchmarks", "migrate/flatout_migrate", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    scripts = [ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in files]
    for own in [*map(nodes, trees()), *scripts]:
        for node in own:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute):
                found[node.attr] += 1
            elif isinstance(node, ast.alias):
                found[node.name.split(".")[-1]] += 1
    return found


def test_no_definition_that_only_tests_use():
    used = uses()
    unused = {f"{path}: {name}" for path in trees() for name in definitions(path) if not used[name]}
    # the entry point of the package, and what other code finds by name
    entry_points = {f"flatout/cli/{verb}.py: {name}" for verb in VERBS for name in ("add_arguments", "run")}
    classes = (traits.class_path.split(".") for traits in STRATEGIES.values())
    entry_points |= {f"flatout/parallel/strategies/{module}.py: {name}" for module, name in classes}
    kinds = (class_path.split(".") for class_path in OBJECTIVES.values())
    entry_points |= {f"flatout/objectives/{module}.py: {name}" for module, name in kinds}
    makers = (traits.make.split(".") for traits in OPTIMIZERS.values())
    entry_points |= {f"flatout/optim/{module}.py: {name}" for module, name in makers}
    trackers = (class_path.rpartition(".") for _, class_path in TRACKERS.values())
    entry_points |= {f"{module.replace('.', '/')}.py: {name}" for module, _, name in trackers}
    starts = (place.split(".") for place in ADAPTER_STARTS.values())
    entry_points |= {f"flatout/models/lora/{module}.py: {name}" for module, name in starts}
    assert unused - entry_points == set(KNOWN_UNUSED), "delete what nothing uses, tests aside, or use it"


def test_a_strategy_with_an_engine_of_its_own_has_no_if_outside_its_files():
    own = {"flatout/config/deepspeed.py", "flatout/parallel/strategies/deepspeed.py"}
    leaks = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path in trees()
        if path not in own
        for node in nodes(path)
        if (isinstance(node, ast.Compare) and "'deepspeed'" in ast.unparse(node))
        or any("ds_shape" in str(getattr(node, part, "")) for part in ("attr", "value", "id"))
        or (isinstance(node, ast.Name) and node.id == "PartitionedOptimizer")
    ]
    assert not leaks, "ask the strategy, or its row in STRATEGIES"


def identifiers(path: str) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_no_test_patches_a_private_name():
    """Another way to do the same must not fail a test: give the code a seam, or test through the command line."""
    patch = re.compile(r"""\b(?:setattr|delattr)\(\s*(?:[\w.]+,\s*)?["'](?:[\w.]+\.)?_(?!_)\w+["']""")
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert not [f"{path}: {found[0]}" for path, text in texts.items() for found in patch.finditer(text)]


def test_names_are_the_fields_words():
    wrong = [
        f"{path}:{line} {name}; say {WORDS[name]}"
        for path in trees()
        for line, name in identifiers(path)
        if name in WORDS
    ]
    wrong += [f"{path}; say {MODULES[Path(path).stem]}" for path in trees() if Path(path).stem in MODULES]
    assert not wrong


def test_functions_are_neither_crumbs_nor_scrolls():
    # a callback has a method for each thing that a run reports, however little it does with it
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in trees()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("on_")
        # a rule of a table of names is a row of it: one name, one decision
        and not path.startswith("flatout/compat/")
        # torch registers an operator's run, its shapes and its gradient as functions of their own
        and not path.startswith("flatout/kernels/")
        # nor has a method of a protocol a body, and properties and validators are declarations
        and not all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node.body)
        and not any(word in ast.unparse(how) for how in node.decorator_list for word in ("property", "validator"))
    ]
    assert LEAST_MEDIAN_LINES <= statistics.median(lengths) <= MOST_MEDIAN_LINES


def test_few_functions_take_more_than_seven_parameters():
    wide = {
        f"{path}:{node.lineno} {node.name}"
        for path in trees()
        if not path.startswith("flatout/kernels/")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len({one.arg for one in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls", "ctx"})
        > MOST_PARAMETERS
    }
    assert len(wide) <= MAX_WIDE_FUNCTIONS, "pass one value that holds what belongs together"


def test_no_package_outgrows_its_budget():
    lines: Counter[str] = Counter()
    for path in trees():
        parts = Path(path).parts
        lines[parts[1].removesuffix(".py")] += len((ROOT / path).read_text(encoding="utf-8").splitlines())
    grown = {name: count for name, count in lines.items() if count > MAX_PACKAGE_LINES.get(name, 0)}
    assert not grown, "change the structure, or raise the limit and write why in docs/architecture.md"
    assert sum(lines.values()) <= MAX_LINES
