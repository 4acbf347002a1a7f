"""The role names of common data sets, and the roles they map to."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.data.conversation import ROLES
from flatout.data.rows.formats.fields import FieldError, kind

# not a separate role: an assistant turn whose text is a function call in JSON
CALL = "function_call"
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "tool_result", "ipython"),
    CALL: ("function_call", "tool_call"),
}
_KNOWN = {name: role for role, names in _NAMES.items() for name in names}
TARGETS = (*ROLES, CALL)


def role_of(value: object, place: str, extra: Mapping[str, str]) -> str:
    """Return one of ROLES or CALL. The user's `extra` names take precedence; built-in names match in any case.

    Raises FieldError for an unknown name, with the allowed names and the setting that adds one.
    """
    if not isinstance(value, str):
        raise FieldError(f"{place} is {kind(value)}, not a text")
    role = extra.get(value) or _KNOWN.get(value) or _KNOWN.get(value.lower())
    if role is None:
        raise FieldError(
            f"{place} {value!r:.200} is unknown; allowed: {', '.join(_KNOWN)}; "
            f"map others with roles, such as roles: {{{value if value.isprintable() else repr(value):.200}: assistant}}"
        )
    return role
