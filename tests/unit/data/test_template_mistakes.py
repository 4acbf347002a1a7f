"""The ordinary mistakes of a template's author are one sentence each, whatever Python raises for them."""

import json

import pytest

from flatout.cli.main import main

GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
MISTAKES = [
    "{{ '{1}'.format(1) }}",
    "{% break %}",
    "{{ 'x'.encode('nope') }}",
    "{{ '\\ud800' }}",
    "{{ 1 / 0 }}",
    "{{ 'abc' | int(base=99) | nope }}",
    "{{ [1, 2] | slice(0) | list }}",
    "{{ strftime_now(1) }}",
    "{{ 'x'.__class__ }}{{ b.c }}",
    "{{ self.x() }}",
    "{{ cycler() }}",
    "{{ messages[9].content.x }}",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(tiny, tmp_path, mistake, capsys):
    rows, template = tmp_path / "rows.jsonl", tmp_path / "mine.jinja"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    build = ["data", "build", str(rows), "--tokenizer", str(tiny.model_dir), "--name", "x", "--num-procs", "1"]
    build += ["--root", str(tmp_path / "data"), "--template", str(template)]
    # at once, and only once an answer is rendered
    in_answers = GOOD.replace("{% endfor %}", "{% if m.role == 'assistant' %}" + mistake + "{% endif %}{% endfor %}")
    for source in (mistake + GOOD, in_answers) if mistake != "{% break %}" else (mistake + GOOD,):
        template.write_text(source)
        assert main(build) == 3
        error = capsys.readouterr().err
        assert "chat template 'mine.jinja'" in error
        assert "Traceback" not in error
    template.write_text(GOOD)
    assert main(build) == 0
