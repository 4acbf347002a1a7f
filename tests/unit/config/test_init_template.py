import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from flatout.cli.init import starting_config
from flatout.cli.main import main
from flatout.config.describe import ADVANCED, PATHS, changed_settings, dotted_names, render_template
from flatout.config.optim import LR_OF_METHOD
from flatout.config.read import load_config, make_config
from flatout.config.rewards import RewardConfig
from flatout.config.schema import Config, DataConfig, SourceConfig
from flatout.data.build import open_or_build
from flatout.errors import UsageError

CHANGED = {
    "name": "changed",
    "run_dir": "somewhere/else",
    "method": "full",
    "freeze": ["embed", r"layers\.0\."],
    "model": {"name": "org/model", "precision": "fp64"},
    "data": {
        "max_tokens": None,
        "sources": [
            {"path": "a: #b.jsonl", "weight": 0.5, "columns": {"instruction": "frage"}},
            {"path": "org/set", "system": "Two\nlines: 'quoted'"},
        ],
    },
    "optim": {"eps": 1e-12, "max_grad_norm": None},
    "eval": {"fraction": 0.125, "every_steps": 7, "patience": 3},
}


def rendered(config: Config, folder: Path) -> str:
    text = render_template(config, ["First line.", "  second: line"])
    (folder / "config.yaml").write_text(text)
    assert load_config(folder / "config.yaml") == config
    return text


def test_defaults_round_trip_and_every_setting_is_there(tmp_path):
    values = yaml.safe_load(rendered(make_config({"model": {"name": "m"}}), tmp_path))
    for name in dotted_names():
        if name.rpartition(".")[0] in PATHS:
            continue  # the list is empty
        place = values
        for part in name.split("."):
            assert part in place, name
            place = place[part]


def test_changed_values_round_trip_and_their_defaults_are_told(tmp_path):
    text = rendered(make_config(CHANGED), tmp_path)
    assert "default 1.0e-08]" in text
    assert "default lora]" in text
    assert "one of lora, full" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    # a changed one is always shown, also if it is advanced
    for which in ("first", "all", "advanced"):
        assert "eps: 1.0e-12" in render_template(make_config(CHANGED), which=which)


@pytest.mark.parametrize("which", ["first", "all", "advanced"])
def test_parameters_of_an_objective_are_written(which):
    config = make_config({"model": "m", "objective": {"kind": "dpo", "beta": 0.3}})
    assert make_config(yaml.safe_load(render_template(config, which=which))) == config


def sections(section: type[BaseModel] = Config) -> list[type[BaseModel]]:
    inner = [f.annotation for f in section.model_fields.values()]
    found = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return [section, *(deeper for kind in found for deeper in sections(kind))]


def test_every_setting_has_help_and_the_file_has_all_of_it():
    text = " ".join(render_template(make_config({"model": {"name": "m"}})).replace("#", " ").split())
    for section in [*sections(), SourceConfig, RewardConfig]:
        help_text = " ".join((section.__doc__ or "?").partition("\n\n")[0].split())
        assert section in (Config, SourceConfig, RewardConfig) or help_text in text
        for name, field in section.model_fields.items():
            if field.annotation in sections():
                continue  # a section's help is its docstring
            assert field.description, f"{section.__name__}.{name} has no help"
            assert " ".join(field.description.split()) in text, f"{section.__name__}.{name}"


def leaves(text: str) -> set[str]:
    def names(values: object, prefix: str = "") -> set[str]:
        if not (isinstance(values, dict) and values):
            return {prefix.removesuffix(".")}
        return {name for key, value in values.items() for name in names(value, f"{prefix}{key}.")}

    return names(yaml.safe_load(text)).intersection(dotted_names())


def test_all_shows_sixty_settings_and_advanced_the_others_with_their_reasons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("", "--all", "--advanced"):
        words = ["init", f"run{option}.yaml", "--data", "d", "--model", "m", option]
        assert main([word for word in words if word]) == 0
    first, common, every = (Path(f"run{option}.yaml").read_text() for option in ("", "--all", "--advanced"))
    assert leaves(first) < leaves(common) < leaves(every)
    assert len(leaves(common)) <= 60
    assert leaves(every) - leaves(common) == ADVANCED.keys(), "a setting that does not exist, or a section"
    told = " ".join(every.replace("#", " ").split())
    assert all(f"Advanced: {why}." in told for why in ADVANCED.values())


def test_init_with_data_and_model_writes_no_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my run.yaml", "--data", "built-1", "--model", "org/model"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["my run.yaml"]
    config = load_config(Path("my run.yaml"))
    assert (config.name, config.model.name, config.model.init, config.method) == (
        "my-run",
        "org/model",
        "pretrained",
        "lora",
    )
    assert (config.data.name, config.data.sources) == ("built-1", [])


@pytest.mark.parametrize("named", ["chat.jsonl", "org/set", "rows/*.json", "./here", "folder"])
def test_data_that_is_no_name_becomes_a_source(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert [source.path for source in starting_config("r", data=named, model="m").data.sources] == [named]


@pytest.mark.exhaustive
def test_init_alone_plans_and_trains_unmodified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert main(["plan", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "batch.max_steps=2"]) == 0
    assert Path("runs/run/final/model.safetensors").is_file()
    assert "wrote demo/" in capsys.readouterr().out


def test_a_first_file_is_short_and_all_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    given = ["--data", "rows.jsonl", "--model", "org/model"]
    assert main(["init", "first.yaml", *given]) == main(["init", "first-all.yaml", "--all", *given]) == 0
    first, everything = (Path(name).read_text() for name in ("first.yaml", "first-all.yaml"))
    assert load_config(Path("first.yaml")).model_copy(update={"name": "first-all"}) == load_config(
        Path("first-all.yaml")
    )
    assert len(first.splitlines()) < 90 < 200 < len(everything.splitlines())
    # a line of a source's comment that goes on is as far in as its first one
    of_sources = first.partition("  # Write a source as")[2].partition("  sources:")[0].splitlines()[1:]
    assert all(line.startswith("  #   ") for line in of_sources)
    assert 3 <= len(of_sources) <= 6
    assert "  #   unread_files:" not in first
    assert "  #   unread_files:" in everything
    assert "lr: auto" in first
    full = first.replace("method: lora", "method: full").partition("# --- Low-rank")
    Path("full.yaml").write_text(full[0] + full[2].partition("\n\n")[2])
    assert load_config(Path("full.yaml")).optim.lr == LR_OF_METHOD["full"] < load_config(Path("first.yaml")).optim.lr
    assert "deepspeed" not in first


def test_a_built_data_set_names_its_model(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "run.yaml", "--data", "chats"]) == 2
    assert "--data chats: also give --model" in capsys.readouterr().err
    build = ["data", "build", str(tiny.chats), "--name", "chats", "--tokenizer", str(tiny.model_dir)]
    assert main(build) == 0
    assert main(["init", "run.yaml", "--data", "chats"]) == 0
    assert main(["plan", "run.yaml"]) == 0
    config = load_config(Path("run.yaml"))
    assert (config.model.name, config.method, config.data.name) == (str(tiny.model_dir), "lora", "chats")
    assert not Path("demo").exists()


def test_schema_is_the_models_own(tmp_path, capsys):
    assert main(["init", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == Config.model_json_schema()
    assert schema["$defs"]["LoraConfig"]["properties"]["rank"]["description"].startswith("Rank of the adapter")
    assert main(["init", "--schema", str(tmp_path / "flatout.schema.json")]) == 0
    assert json.loads((tmp_path / "flatout.schema.json").read_text()) == schema


@pytest.mark.parametrize(
    ("values", "is_taken"),
    [
        ({"model": "m", "data": "d", "objective": "grpo", "track": "wandb"}, True),
        ({"rollout": {"rounds": 1, "rewards": "number"}, "track": {"to": "wandb"}}, True),
        ({"rollout": {"rounds": 1, "rewards": ["number", {"path": "r.py:f"}]}, "data": {"sources": ["a.jsonl"]}}, True),
        ({"data": ["a.jsonl", {"path": "b.jsonl"}]}, True),
        ({"rollout": {"rounds": 1, "rewards": 3}}, False),
        ({"data": {"sources": [3]}}, False),
        ({"track": {"to": 3}}, False),
    ],
)
def test_an_editor_takes_the_short_forms_that_a_file_may_have(values, is_taken):
    values = {"model": "m", **values}
    assert jsonschema.Draft202012Validator(Config.model_json_schema()).is_valid(values) == is_taken
    if is_taken:
        make_config(values)
    else:
        with pytest.raises(UsageError):
            make_config(values)


def test_the_way_back_to_the_defaults_is_complete():
    config = make_config(CHANGED)
    back = [f"{name}={default}" for name, default in changed_settings(config)]
    assert make_config(config.model_dump(mode="json"), back) == make_config({"model": {"name": "org/model"}})
    assert len(back) == 13


@pytest.mark.parametrize(
    ("data", "header", "columns", "options"),
    [
        ("qa.csv", "query,context,answer", {"instruction": "query", "input": "context", "output": "answer"}, []),
        ("tables", "user,assistant", {"instruction": "user", "output": "assistant"}, []),
        ("tables/*.csv", "user,assistant", {"instruction": "user", "output": "assistant"}, []),
        ("qa.csv", "frage,antwort", {"instruction": "frage", "output": "antwort"},
         ["--column", "instruction=frage", "--column", "output=antwort"]),
    ],
)  # fmt: skip
def test_a_csv_of_questions_and_answers_needs_two_commands(
    tmp_path, monkeypatch, capsys, tiny, data, header, columns, options
):
    monkeypatch.chdir(tmp_path)
    cells = header.split(",")
    rows = "".join(",".join(f"{cell} {number}" for cell in cells) + "\n" for number in range(40))
    table = tmp_path / ("qa.csv" if data == "qa.csv" else "tables/qa.csv")
    table.parent.mkdir(exist_ok=True)
    table.write_text(f"{header}\n{rows}")
    assert main(["init", "run.yaml", "--model", str(tiny.model_dir), "--data", data, *options]) == 0
    config = load_config(tmp_path / "run.yaml")
    assert config.data.sources[0].columns == columns
    assert (f"columns    {data}: " in capsys.readouterr().out) == (bool(columns) and not options)
    assert main(["data", "build", data, "--tokenizer", str(tiny.model_dir), "--name", "by-hand", *(
        f"--column={ours}={theirs}" for ours, theirs in columns.items())]) == 0  # fmt: skip
    by_hand = open_or_build(DataConfig(name="by-hand"), str(tiny.model_dir))
    assert (
        open_or_build(config.data, str(tiny.model_dir)).num_label_tokens.tolist() == by_hand.num_label_tokens.tolist()
    )
