"""A Modelfile for Ollama: the model's file, its chat template in Go's language, stop tokens and sampling."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from flatout.data.templates.template import RENDER_ERRORS
from flatout.errors import Fix, UsageError
from flatout.io.template_limits import bounded

# control characters, and Unicode's ends of lines and paragraphs
_LINE_ENDS = ("Cc", "Zl", "Zp")
_ROLES = ("system", "user", "assistant")
# conversations on which the Go template must equal the tokenizer's own; each ends before an answer
_TRIED = ("u", "su", "uau", "suau", "uauau", "suauau")


def modelfile(file_name: str, model: Any, tokenizer: Any, stop_ids: Sequence[int]) -> tuple[str, str]:
    """Return a Modelfile, and a line that says where Ollama gets the chat template from.

    Raises UsageError for names and tokens that a Modelfile, which has no escapes, would read as something else.
    """
    _require_plain(file_name, "the name of the run's folder", "; rename it")
    lines = [f"FROM ./{file_name}"]
    note = "Ollama chooses one of its own chat templates by the one in the GGUF file; compare `ollama show --template`"
    if (template := go_template(tokenizer)) is not None:
        lines.append(f'TEMPLATE """{template}"""')
        note = "the Modelfile has the chat template: it equals the tokenizer's for system, user and assistant turns"
    for token_id in stop_ids:
        text = str(tokenizer.decode([token_id]))
        _require_plain(text, f"token {token_id}, at which answers end,", "", Fix({"--to": "gguf"}))
        lines.append(f'PARAMETER stop "{text}"')
    config = model.generation_config
    if config is not None and config.do_sample:
        values = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
        lines += [f"PARAMETER {name} {value:g}" for name, value in values.items() if value is not None]
    elif config is not None:
        lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n", note


def _require_plain(text: str, what: str, remedy: str, *fixes: Fix) -> None:
    if '"' in text or not text.strip() or any(unicodedata.category(letter) in _LINE_ENDS for letter in text):
        raise UsageError(f"{what} is {text!r:.100}, which a Modelfile of Ollama cannot hold{remedy}", fixes)


def go_template(tokenizer: Any) -> str | None:
    """Return a Go template that writes each turn as the tokenizer's chat template does; None if there is none.

    It is derived from what the template writes around the text of each role, and compared with it on conversations.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str) or "strftime_now" in source:  # a date would be today's for ever
        return None
    try:
        with bounded("the tokenizer's chat template"):
            around, default, prompt = _derive(tokenizer)
            for roles in _TRIED:
                messages = _conversation(roles)
                rendered = "".join(around[message["role"]].replace("{}", message["content"]) for message in messages)
                expected = _render(tokenizer, roles, prompts=True)
                if ("" if "s" in roles else default) + rendered + prompt != expected:
                    return None
    except (*RENDER_ERRORS, IndexError):  # it refuses a role, or does not write its text
        return None
    texts = [piece for text in (*around.values(), default, prompt) for piece in text.split("{}")]
    # what Go or the Modelfile would read as its own; a brace beside an action, or a quote beside the end, joins it
    if any(mark in text for text in texts for mark in ("{{", "}}", '"""')) or prompt.endswith('"'):
        return None
    if any(text.endswith("{") or text.startswith("}") for text in texts):
        return None
    turns = [f'if eq .Role "{role}" }}}}{around[role].replace("{}", "{{ .Content }}")}{{{{ ' for role in _ROLES]
    start = f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    return f"{start}{{{{ range .Messages }}}}{{{{ {'else '.join(turns)}end }}}}{{{{ end }}}}{prompt}"


def _derive(tokenizer: Any) -> tuple[dict[str, str], str, str]:
    """Return the text of each role's turn with {} for its content, that before a first user turn, and the prompt."""
    system, user, answer, last = (message["content"] for message in _conversation("suau"))
    whole = _render(tokenizer, "suau")
    prompt = _render(tokenizer, "suau", prompts=True).removeprefix(whole)
    before_system, between, before_answer, before_last, after_user = _split(whole, system, user, answer, last)
    after_answer = _split(_render(tokenizer, "sua"), system, user, answer)[-1]
    before_user = before_last.removeprefix(after_answer)
    alone = _split(_render(tokenizer, "u"), _conversation("u")[0]["content"])[0]
    around = {
        "system": f"{before_system}{{}}{between.removesuffix(before_user)}",
        "user": f"{before_user}{{}}{after_user}",
        "assistant": f"{before_answer.removeprefix(after_user)}{{}}{after_answer}",
    }
    return around, alone.removesuffix(before_user), prompt


def _split(text: str, *contents: str) -> list[str]:
    parts = []
    for content in contents:
        before, text = text.split(content)
        parts.append(before)
    return [*parts, text]


def _conversation(roles: str) -> list[dict[str, str]]:
    names = {name[0]: name for name in _ROLES}
    return [{"role": names[role], "content": f"flatout{index}text"} for index, role in enumerate(roles)]


def _render(tokenizer: Any, roles: str, *, prompts: bool = False) -> str:
    """Return a rendered conversation without the token at its start, which llama.cpp adds."""
    text = tokenizer.apply_chat_template(_conversation(roles), tokenize=False, add_generation_prompt=prompts)
    return str(text).removeprefix(tokenizer.bos_token or "")
