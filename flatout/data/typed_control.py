"""Control tokens that a person typed into the data: where they stand in the rendered text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data.template import RENDER_ERRORS, ChatTemplate, RawMessage

_OPEN, _CLOSE = "\U000f5a03", "\U000f5a04"
_PLACE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class UnplacedControlError(ValueError):
    """A control token stands in the data and its place in the rendered text cannot be proved."""


def find_typed(
    template: ChatTemplate,
    messages: Sequence[RawMessage],
    tools: Sequence[Mapping[str, Any]],
    text: str,
    control: re.Pattern[str] | None,
) -> tuple[tuple[int, int], ...]:
    """Character ranges of `text` that are control tokens out of `messages` or `tools`, ascending.

    Each is replaced by a numbered placeholder before rendering; putting them back must give `text` again.
    Raises UnplacedControlError when it does not.
    """
    if control is None:
        return ()
    typed: list[str] = []
    replaced, replaced_tools = _replace(list(messages), control, typed), _replace(list(tools), control, typed)
    if not typed:
        return ()
    try:
        marked = template.render(replaced, replaced_tools)
    except RENDER_ERRORS as error:
        raise UnplacedControlError(f"the data holds {typed[0]!r} and the template depends on it: {error}") from error
    spans, parts, position, last = [], [], 0, 0
    for place in _PLACE.finditer(marked):
        token = typed[int(place[1])]
        parts += [marked[last : place.start()], token]
        position += place.start() - last
        spans.append((position, position + len(token)))
        position += len(token)
        last = place.end()
    if "".join([*parts, marked[last:]]) != text:
        raise UnplacedControlError(f"the data holds {typed[0]!r} and the template treats it as structure; remove it")
    return tuple(spans)


def _replace(value: Any, control: re.Pattern[str], typed: list[str]) -> Any:
    if isinstance(value, str):

        def place(match: re.Match[str]) -> str:
            typed.append(match[0])
            return f"{_OPEN}{len(typed) - 1}{_CLOSE}"

        return control.sub(place, value)
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _replace(item, control, typed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, control, typed) for item in value]
    return value
