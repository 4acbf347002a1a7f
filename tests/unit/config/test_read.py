import gzip
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatout
from flatout.config.describe import dotted_names
from flatout.config.names import FOREIGN_NAMES
from flatout.config.read import dump_config, load_config, make_config
from flatout.config.schema import Config, ModelConfig, OptimConfig
from flatout.errors import ProblemsError, SecurityError, UsageError, as_text

MINIMAL = "model: {name: m}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal_of(folder: Path, text: str, *overrides: str) -> ProblemsError:
    with pytest.raises(ProblemsError) as caught:
        load_config(write(folder, text), overrides)
    assert caught.value.exit_code == 2
    return caught.value


def test_defaults_and_overrides(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), ["lora.rank=32", "optim.lr=1e-4", "batch.max_steps=7"])
    assert (config.lora.rank, config.optim.lr, config.batch.max_steps) == (32, 1e-4, 7)
    assert config.folder == Path("runs/run")


def test_all_problems_are_told_at_once(tmp_path):
    text = MINIMAL + "lora: {rnak: 8, alpha: -1}\nbatch: {samples_per_step: 0}\n"
    refusal = refusal_of(tmp_path, text, "nonsense", "optim.lr=fast")
    assert [problem.partition(":")[0].partition(" is")[0] for problem in refusal.problems] == [
        "'nonsense'", "lora.alpha", "lora.rnak", "batch.samples_per_step", "optim.lr",
    ]  # fmt: skip
    mended = {"lora.alpha": 32.0, "batch.samples_per_step": 32, "optim.lr": 0.0002}
    assert [fix.settings for fix in refusal.fixes] == [mended]
    make_config({"model": "m"}, [f"{name}={value}" for name, value in mended.items()])


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("bacth.epochs=3", {"batch.epochs": 3}),
        ("lerning_rate=1e-4", {"optim.lr": "1e-4"}),
        ("optim.lerning_rate=1e-4", {"optim.lr": "1e-4"}),
        ("optim.qqqq=1", None),
    ],
)
def test_a_slip_in_an_override_is_of_the_command_line_and_has_its_fix(tmp_path, typed, fix):
    refusal = refusal_of(tmp_path, MINIMAL, typed)
    assert refusal.text.startswith("the command line: ")
    assert refusal.problems[0].startswith(f"{typed.partition('=')[0]}: unknown key")
    assert [one.settings for one in refusal.fixes] == ([fix] if fix else [])


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("lora: {}\n", "model: missing; every run needs it"),
        (MINIMAL + "rank: 8\n", "rank: unknown key; did you mean lora.rank?"),
        (MINIMAL + "schedule: {warmup_steps: 3, warmup_ratio: 0.1}\n", "keep one"),
        (MINIMAL + "base: {storage: fp8, compute: model}\n", "storage fp8 supports only fp8 matmuls"),
        (MINIMAL + "base: {storage: fp8, backward: fp8}\n", "backward fp8 has no effect with storage fp8"),
        (MINIMAL + "method: full\nfreeze: ['(']\n", "not a valid regular expression"),
        (MINIMAL + "lora: {targets: []}\n", "targets is empty"),
        (MINIMAL + "eval: {fraction: 0.1, data: other}\n", "keep one"),
        (MINIMAL + "optim: {lr: .nan}\n", "optim.lr"),
        (MINIMAL + "name: ../x\n", "name: use letters, digits"),
        (MINIMAL + "data: {name: '-rf'}\n", "data.name: use letters, digits"),
        (MINIMAL + "eval: {data: 'a b'}\n", "eval.data: string should match pattern"),
        (MINIMAL + 'name: "a\\0b"\n', "name: use letters, digits"),
        (MINIMAL + "lora: {rank: true}\n", "lora.rank: expected"),
        (MINIMAL + "optim: {max_grad_norm: false}\n", "optim.max_grad_norm: expected"),
        ("model: 5\n", "model: expected a section with settings, got 5"),
        (MINIMAL + "lora: []\n", "lora: expected a section with settings, got []"),
        (MINIMAL + "run_dir: [a]\n", "run_dir: expected"),
    ],
)
def test_bad_values_name_the_field(tmp_path, text, core):
    assert any(core in problem for problem in refusal_of(tmp_path, text).problems)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("schedule: {decay_ratio: 0.2}", {"schedule.kind": "wsd"}),
        ("base: {compute: fp8}", {"base.storage": "fp8"}),
        ("base: {storage: nf4, backward: fp8}", {"base.backward": "same", "base.compute": "fp8"}),
        ("base: {storage: nf4, compute: fp8}\nlora: {dropout: 0.1}", {"base.compute": "model"}),
        ("method: full\nfull: {update: backward}", {"optim.max_grad_norm": None}),
        ("eval: {patience: 2}", {"eval.every_steps": 0.1}),
        ("freeze: [embed]", {"method": "full"}),
        ("sharding: {offload: true}", {"strategy": "fsdp"}),
        ("experts: {parallel: 2}\nbase: {backward: fp8}", {"experts.parallel": 1}),
        ("deepspeed: {}", {"strategy": "deepspeed"}),
        ("gpus: 2.0", {"gpus": 2}),
        ("strategy: zero4", {"strategy": "zero3"}),
    ],
)
def test_what_mends_a_file_is_accepted_with_it(tmp_path, text, fix):
    refusal = refusal_of(tmp_path, MINIMAL + text + "\n")
    assert refusal.fixes[0].settings == fix
    path, words = tmp_path / "run.yaml", [f"{name}={as_text(value)}" for name, value in fix.items()]
    while "eval" in text and "eval.fraction=0.05" not in words:  # which needs rows in turn
        with pytest.raises(ProblemsError) as caught:
            load_config(path, words)
        words.append(str(caught.value.fixes[0]))
    load_config(path, words)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("num_generations", "group"),
        ("max_completion_length", "max_new_tokens"),
        ("max_prompt_length", "max_prompt_tokens"),
    ],
)
def test_names_of_grpo_elsewhere_lead_to_settings_of_rounds(tmp_path, name, setting):
    rounds = MINIMAL + "objective: grpo\nrollout: {rounds: 2, rewards: [number], %s: 16}\n"
    assert f"did you mean rollout.{setting}?" in str(refusal_of(tmp_path, rounds % name))
    load_config(write(tmp_path, rounds % setting))


def test_every_number_refuses_nonsense(tmp_path):
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
            assert any(text.startswith(name) for text in refusal_of(tmp_path, MINIMAL, f"{name}={value}").problems)


@pytest.mark.parametrize("objective", ["cross_entropy", "classify"])
@pytest.mark.parametrize("value", [5, [1, 2], "5", True, None, {"modules_to_save": None}])
@pytest.mark.parametrize("section", ["lora", "optim", "batch"])
def test_what_is_no_section_is_refused_as_such_with_every_objective(section, value, objective):
    wrong = "lora.modules_to_save: expected" if isinstance(value, dict) and section == "lora" else section
    values = {"model": "m", "objective": objective, section: value}
    with pytest.raises(ProblemsError, match=rf"- {re.escape(wrong)}"):
        make_config(values)
    with pytest.raises(ProblemsError, match=rf"- {re.escape(wrong)}"):
        flatout.train(values)
    with pytest.raises(ValueError, match=rf"(?m)^{section}"):  # pydantic's own
        Config(**values, rank=8, lr=1e-4, max_steps=1) if not isinstance(value, dict) else Config(**values)


def test_a_section_that_is_one_gets_the_score_that_an_objective_trains(tmp_path):
    path = write(tmp_path, MINIMAL + "objective: classify\n")
    for words in ([], ["lora={rank: 8}"], ["lora.modules_to_save=[score]"]):
        assert load_config(path, words).lora.modules_to_save == ["score"]
    assert load_config(path, ["lora.modules_to_save=[norm]"]).lora.modules_to_save == ["norm", "score"]
    assert Config(model="m", objective="classify", lora={}, rank=8).lora.rank == 8  # type: ignore[call-arg, arg-type]


def test_config_is_frozen(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_resolved_config_reads_back_equal(tmp_path):
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
        ("", UsageError, "expected sections such as `model:`, found nothing"),
        ("seed: 2026-13-45\n", UsageError, "month must be in"),
        ("seed: " + "9" * 5000, UsageError, "4300 digits"),
        ("data: " + "[" * 30 + "]" * 30, SecurityError, "more than 20 levels"),
        ("data: " + "{a: " * 3000, SecurityError, "more than 20 levels"),
        ("data: &a [*a]\n", UsageError, "an alias refers to a value that contains it"),
        ("name: a\nmodel: {name: !!binary bW9kZWw=}\n", UsageError, "line 2: !!binary is no kind of setting"),
        ("data: {sources: !!set {a: null}}\n", UsageError, "line 1: !!set is no kind of setting"),
        ("data: !!omap [a: 1]\n", UsageError, "line 1: !!omap is no kind of setting"),
    ],
)
def test_hostile_or_broken_files_are_refused(tmp_path, text, error, core):
    with pytest.raises(error, match=core):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (MINIMAL.encode("utf-16"), "it is UTF-16"),
        (gzip.compress(MINIMAL.encode(), mtime=0), "it is compressed"),
        (MINIMAL.encode() + "name: \u00e9\n".encode("latin-1"), r"run\.yaml:2: .* it is not UTF-8"),
    ],
)
def test_other_encodings_are_named(tmp_path, content, what):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=what):
        load_config(tmp_path / "run.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(tmp_path / "run.yaml").model.name == "m"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import flatout\nconfig = 1; raise RuntimeError('no')\n", r"run\.py:2: .*RuntimeError: no"),
        ("import flatout, sys\nconfig = 1; sys.exit(0)\n", r"run\.py:2: .*SystemExit"),
        ("import flatout\nconfig = (\n", r"run\.py:2: .*SyntaxError"),
        ("import flatout\nconfig = 1\ndef f(): f()\nf()\n", r"run\.py:3: .*RecursionError"),
    ],
)
def test_python_that_fails_is_told_with_its_line(tmp_path, code, what):
    with pytest.raises(UsageError, match=what):
        load_config(write(tmp_path, code, "run.py"))


def test_a_long_value_is_shown_in_part(tmp_path):
    (problem,) = refusal_of(tmp_path, MINIMAL + f"strategy: {'x' * 5000}\n").problems
    assert "got 'xxx" in problem
    assert len(problem) < 300


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_alias_bomb_is_refused_at_once(tmp_path, brackets):
    keys = ["" if brackets == "[]" else f"k{i}: " for i in range(10)]

    def level(value: str) -> str:
        return brackets[0] + ", ".join(key + value for key in keys) + brackets[1]

    levels = [f"a0: &a0 {level('x')}"]
    levels += [f"a{i}: &a{i} {level(f'*a{i - 1}')}" for i in range(1, 20)]
    started = time.process_time()
    with pytest.raises(SecurityError, match="aliases"):
        load_config(write(tmp_path, "\n".join(levels)))
    assert time.process_time() - started < 2


def test_a_target_key_imports_nothing(tmp_path):
    assert refusal_of(tmp_path, MINIMAL + "_target_: os.system\n").problems[0].startswith("_target_: unknown key")


def test_python_config_runs_only_as_a_py_file(tmp_path):
    code = (
        "from flatout.config.schema import Config, ModelConfig\nconfig = Config(model=ModelConfig(name='m'), seed=7)\n"
    )
    assert load_config(write(tmp_path, code, "run.py"), ["seed=8"]).seed == 8
    with pytest.raises(UsageError, match="must set `config`"):
        load_config(write(tmp_path, "x = 1\n", "bad.py"))


def test_a_bare_off_is_off(tmp_path):
    """YAML reads off as false."""
    assert load_config(write(tmp_path, MINIMAL + "compile: off\n")).compile == "off"
    assert load_config(write(tmp_path, MINIMAL), ["compile=off"]).compile == "off"
    assert load_config(write(tmp_path, dump_config(load_config(write(tmp_path, MINIMAL), ["compile=off"])), "b.yaml"))


# settings that have no effect or no sense together, the word of the error that names one, and their like that have
SENSELESS = {
    "lora.rank=8 method=full": ("lora is only for method: lora", "lora.rank=8 method=lora"),
    "base.storage=nf4 method=full": ("base is only for method: lora", "base.storage=nf4"),
    "full.weights=bf16": ("full is only for method: full", "full.weights=bf16 method=full"),
    "freeze=[head]": ("freeze is only for method: full", "freeze=[head] method=full"),
    "optim.lr=1e99": ("optim.lr", "optim.lr=10"),
    "optim.lr_ratio=16 method=full": ("optim.lr_ratio is only for method: lora", "optim.lr_ratio=16"),
    "optim.name=sgd optim.beta2=0.9": ("optim: beta2 has no effect", "optim.name=adamw optim.beta2=0.9"),
    "optim.name=sgd optim.eps=0.1": ("optim: eps has no effect", "optim.name=sgd optim.beta1=0.9"),
    "optim.name=adafactor optim.beta2=0.9": ("optim: beta2 has no effect", "optim.name=muon optim.beta2=0.9"),
    "optim.name=adafactor optim.beta1=0.5": ("optim: beta1 has no effect", "optim.name=lion optim.beta1=0.5"),
    "optim.name=lion optim.eps=0.1": ("optim: eps has no effect", "optim.name=muon optim.eps=0.1"),
    "schedule.decay_ratio=0.5": ("schedule: decay_ratio has no effect", "schedule.kind=wsd schedule.decay_ratio=0.5"),
    "schedule.kind=constant schedule.min_lr_ratio=0.5": (
        "schedule: min_lr_ratio has no effect", "schedule.kind=cosine schedule.min_lr_ratio=0.5"),
    "eval.every_steps=5": ("eval: every_steps needs rows to evaluate on", "eval.every_steps=5 eval.fraction=0.1"),
    "eval.min_delta=0.1": (
        "eval: min_delta needs rows", "eval.min_delta=0.1 eval.patience=2 eval.every_steps=5 eval.data=held"),
    "eval.fraction=0.999": ("eval.fraction", "eval.fraction=0.5"),
    "checkpoint.allow_change=[foo]": ("'foo' is not a setting", "checkpoint.allow_change=[optim.lr]"),
    "strategy=ddp sharding.prefetch=3": ("prefetch has no effect", "strategy=fsdp sharding.prefetch=3"),
    "strategy=single sharding.reshard_after_forward=true": (
        "reshard_after_forward has no effect", "strategy=fsdp sharding.reshard_after_forward=true"),
    "strategy=ddp sharding.offload=true": ("sharding.offload needs", "strategy=zero2 sharding.offload=true"),
    "strategy=fsdp sharding.replicas=2": ("sharding.replicas is only for", "strategy=hsdp sharding.replicas=2"),
    "strategy=single comm.compress=bf16": ("comm.compress has no effect", "strategy=ddp comm.compress=bf16"),
    "track.tags=[a]": ("track: tags", "track.tags=[a] track.to=[tensorboard]"),
    "run_dir=data": ("run_dir: data holds", "run_dir=data2"),
    "run_dir=data/built_dataset/x": ("run_dir: data/built_dataset/x holds", "run_dir=data/runs/x"),
    "run_dir=m": ("run_dir: m holds", "run_dir=m/run"),
    "run_dir=./rows.jsonl data.sources=[{path: rows.jsonl}]": (
        "run_dir: rows.jsonl holds", "run_dir=./rows data.sources=[{path: rows.jsonl}]"),
}  # fmt: skip


@pytest.mark.parametrize("words", SENSELESS)
def test_a_setting_without_effect_or_sense_is_refused_and_its_like_is_not(words):
    def make(words: str) -> Config:
        return make_config({"model": {"name": "m"}}, re.findall(r"\S+=(?:\[[^]]*\]|\S+)", words))

    error, like = SENSELESS[words]
    with pytest.raises(UsageError) as caught:
        make(words)
    assert error in str(caught.value)
    make(like)


def test_changes_of_a_setting_or_of_a_section_may_be_allowed():
    config = make_config({"model": {"name": "m"}}, ["checkpoint.allow_change=[optim.lr, lora, data, model]"])
    assert config.checkpoint.allow_change == ["optim.lr", "lora", "data", "model"]


LEARNING_RATES = [("lora", "adamw", 2e-4), ("full", "adamw", 1e-5), ("full", "muon", 1e-5), ("lora", "lion", 5e-5)]


@pytest.mark.parametrize(("method", "name", "lr"), LEARNING_RATES)
def test_the_learning_rate_follows_method_and_optimizer_unless_it_is_given(method, name, lr):
    values: dict[str, Any] = {"model": {"name": "m"}, "method": method, "optim": {"name": name}}
    assert make_config(values).optim.lr == lr
    assert make_config(values, ["optim.lr=auto"]).optim.lr == lr
    assert make_config(values, ["optim.beta1=0.5"]).optim.lr == lr
    assert make_config(values, ["optim.lr=0.5"]).optim.lr == 0.5
    in_python = Config(model=ModelConfig(name="m"), method=method, optim=OptimConfig(name=name, weight_decay=0.1))  # type: ignore[arg-type]
    assert (in_python.optim.lr, in_python.optim.weight_decay) == (lr, 0.1)
    assert in_python.optim.beta2 == (0.99 if name == "lion" else 0.999)
    assert make_config(values, ["optim.beta2=0.9"]).optim.beta2 == 0.9
    # what is written down is the number
    assert yaml.safe_load(dump_config(make_config(values)))["optim"]["lr"] == lr


def test_a_wrong_method_is_one_problem_also_beside_a_rate_that_follows_it():
    for lr in ("auto", 0.1):
        with pytest.raises(UsageError, match="1 problem\n  - method: expected one of lora, full, got 'lroa'"):
            make_config({"model": {"name": "m"}, "method": "lroa", "optim": {"lr": lr}})


def test_every_suggestion_is_a_setting():
    assert {name.partition(":")[0] for name in FOREIGN_NAMES.values()} <= set(dotted_names())
