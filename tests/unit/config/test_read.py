import time
from pathlib import Path

import pytest

from flatout.config.read import dotted_names, dump_config, load_config, make_config
from flatout.config.schema import Config
from flatout.errors import ProblemsError, SecurityError, UsageError

MINIMAL = "model: {name: m}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        load_config(write(folder, text), overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["lora.rank=32", "optim.lr=1e-4", "batch.max_steps=7"])
    assert (config.lora.rank, config.optim.lr, config.batch.max_steps) == (32, 1e-4, 7)
    assert config.folder == Path("runs/run")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = MINIMAL + "lora: {rnak: 8, alpha: -1}\nbatch: {samples_per_step: 0}\n"
    assert problems_of(tmp_path, text, "nonsense", "optim.lr=fast") == [
        "'nonsense' is no override; write section.name=value, such as lora.rank=32",
        "lora.alpha: input should be greater than 0, got -1",
        "lora.rnak: unknown key; did you mean lora.rank?",
        "batch.samples_per_step: input should be greater than or equal to 1, got 0",
        "optim.lr: input should be a valid number, unable to parse string as a number, got 'fast'",
    ]


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("lora: {}\n", "model: missing; every run needs it"),
        (MINIMAL + "rank: 8\n", "rank: unknown key; did you mean lora.rank?"),
        (MINIMAL + "schedule: {warmup_steps: 3, warmup_ratio: 0.1}\n", "keep one"),
        (MINIMAL + "freeze: [embed]\n", "freeze is only for method: full"),
        (MINIMAL + "base: {compute: fp8}\n", "compute fp8 needs storage fp8 or nf4"),
        (MINIMAL + "base: {storage: fp8, compute: model}\n", "storage fp8 has only fp8 products"),
        (MINIMAL + "method: full\nbase: {storage: nf4}\n", "base is only for method: lora"),
        (MINIMAL + "full: {weights: bf16}\n", "full is only for method: full"),
        (MINIMAL + "method: full\nfull: {update: backward}\n", "set optim.max_grad_norm: null"),
        (MINIMAL + "base: {storage: nf4, compute: fp8}\nlora: {dropout: 0.1}\n", "set base.compute: model"),
        (MINIMAL + "memory: 0\n", "memory"),
        (MINIMAL + "recompute: some\n", "recompute"),
        (MINIMAL + "method: full\nfreeze: ['(']\n", "no regular expression"),
        (MINIMAL + "lora: {targets: []}\n", "targets is empty"),
        (MINIMAL + "eval: {fraction: 0.1, data: other}\n", "keep one"),
        (MINIMAL + "eval: {patience: 2}\n", "patience needs every_steps"),
        (MINIMAL + "optim: {lr: .nan}\n", "optim.lr"),
        (MINIMAL + "name: ../x\n", "name: string should match pattern"),
        (MINIMAL + "data: {name: '-rf'}\n", "data.name: string should match pattern"),
        (MINIMAL + "eval: {data: 'a b'}\n", "eval.data: string should match pattern"),
        (MINIMAL + f"name: {'a' * 300}\n", "name: string should match pattern"),
        (MINIMAL + 'name: "a\\0b"\n', "name: string should match pattern"),
    ],
)
def test_bad_values_name_the_field(tmp_path: Path, text: str, core: str) -> None:
    assert any(core in problem for problem in problems_of(tmp_path, text))


def test_every_number_refuses_nonsense(tmp_path: Path) -> None:
    """Each numeric setting x {negative, NaN, text} is refused with its own dotted name."""
    defaults = make_config({"model": {"name": "m"}})
    numeric = [
        name
        for name in dotted_names()
        if "." in name
        and not isinstance(
            value := getattr(getattr(defaults, name.split(".")[0], None), name.split(".")[1], None), bool
        )
        and isinstance(value, int | float)
    ]
    assert len(numeric) > 15
    for name in numeric:
        for value in ("-1", ".nan", "word"):
            assert any(problem.startswith(name) for problem in problems_of(tmp_path, MINIMAL, f"{name}={value}"))


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["lora.targets=[q_proj]", "run_dir=x/y", "eval.fraction=0.1"])
    assert load_config(write(tmp_path, dump_config(config), "again.yaml")) == config


@pytest.mark.parametrize(
    ("text", "error", "core"),
    [
        ("model: !!python/object/apply:os.getcwd []\n", SecurityError, "run.yaml:1: could not determine a constructor"),
        ("model: !!python/name:os.system\n", SecurityError, "only plain values"),
        ("model: {name: m}\nmodel: {name: n}\n", UsageError, "line 2: key 'model' is given twice"),
        ("model: [\n", UsageError, "not valid YAML"),
        ("- a\n", UsageError, "expected sections"),
        ("x" * (1 << 20) + "y", SecurityError, "too large for a configuration"),
    ],
)
def test_hostile_or_broken_files_are_refused(tmp_path: Path, text: str, error: type[UsageError], core: str) -> None:
    with pytest.raises(error, match=core):
        load_config(write(tmp_path, text))


def test_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    started = time.perf_counter()
    with pytest.raises(SecurityError, match="aliases"):
        load_config(write(tmp_path, "\n".join(levels)))
    assert time.perf_counter() - started < 2


def test_a_target_key_imports_nothing(tmp_path: Path) -> None:
    assert problems_of(tmp_path, MINIMAL + "_target_: os.system\n")[0].startswith("_target_: unknown key")


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_python_config_runs_only_as_a_py_file(tmp_path: Path) -> None:
    code = (
        "from flatout.config.schema import Config, ModelConfig\nconfig = Config(model=ModelConfig(name='m'), seed=7)\n"
    )
    assert load_config(write(tmp_path, code, "run.py"), ["seed=8"]).seed == 8
    with pytest.raises(UsageError, match="must set `config`"):
        load_config(write(tmp_path, "x = 1\n", "bad.py"))


def test_schema_documents_every_setting() -> None:
    def missing(schema: dict[str, object]) -> list[str]:
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        return [name for name, field in properties.items() if "description" not in field and "$ref" not in str(field)]

    schema = Config.model_json_schema()
    assert not missing(schema)
    for section in schema["$defs"].values():
        assert not missing(section)


def test_a_bare_off_is_off(tmp_path: Path) -> None:
    """YAML reads off as false."""
    assert load_config(write(tmp_path, MINIMAL + "compile: off\n")).compile == "off"
    assert load_config(write(tmp_path, MINIMAL), ["compile=off"]).compile == "off"
    assert load_config(write(tmp_path, dump_config(load_config(write(tmp_path, MINIMAL), ["compile=off"])), "b.yaml"))
