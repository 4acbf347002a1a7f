"""The three known forms of a reward function: what each is called with, and what it may return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flatout.errors import UsageError

FORMS = (
    "reward(answer, row) -> float",
    "reward(prompts, completions, completion_ids, **columns) -> list of float or None (TRL's)",
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> float (verl's)",
)
# the parameter that tells a form
_TELLING = {"completions": "trl", "solution_str": "verl", "answer": "answer"}
# all that a form can give; in TRL's, a column can have any name
_KNOWN = {"verl": {"data_source", "solution_str", "ground_truth", "extra_info"}, "answer": {"answer", "row"}}


class Signature(NamedTuple):
    """How a reward function is called."""

    form: str
    """answer, trl or verl."""
    is_async: bool
    names: frozenset[str] | None
    """The parameters that it takes; None: any."""

    def arguments(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the keywords of a call: for all answers of a group in TRL's form, else for one."""
        given = _GIVEN[self.form](items)
        return given if self.names is None else {name: given[name] for name in self.names & given.keys()}


def _for_trl(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    is_chat = items[0]["messages"] is not None
    texts = [item["answer"] for item in items]
    columns = items[0]["row"].keys() - {"prompt", "completion"}
    return {name: [item["row"].get(name) for item in items] for name in columns} | {
        "prompts": [item["messages" if is_chat else "prompt"] for item in items],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [item["token_ids"] for item in items],
    }


def _for_verl(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row = items[0]["row"]
    nested = row.get("reward_model")
    given = {**row, **(nested if isinstance(nested, Mapping) else {})}
    given = {name: given[name] for name in ("data_source", "ground_truth") if name in given}
    return given | {"solution_str": items[0]["answer"], "extra_info": row.get("extra_info") or {}}


_GIVEN: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]] = {
    "answer": lambda items: {"answer": items[0]["answer"], "row": items[0]["row"]},
    "trl": _for_trl,
    "verl": _for_verl,
}


def signature_of(function: Callable[..., Any], name: str) -> Signature:
    """Return how a function is called. Raises UsageError for one of no known form; `name` says whose it is."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        parameters = inspect.Signature().parameters.values()
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    named = {each for each, kind in kinds.items() if kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)}
    form = next((form for telling, form in _TELLING.items() if telling in named), None)
    needed = {each.name for each in parameters if each.name in named and each.default is each.empty}
    if form is None or (form == "answer" and "row" not in named) or needed - _KNOWN.get(form, needed):
        got = ", ".join(kinds) or "no parameters"
        raise UsageError(f"{name} has the parameters {got}, which is no known form; write it as {' or '.join(FORMS)}")
    call = function if inspect.isroutine(function) else type(function).__call__
    takes_any = form == "trl" and any(kind == kind.VAR_KEYWORD for kind in kinds.values())
    return Signature(form, inspect.iscoroutinefunction(inspect.unwrap(call)), None if takes_any else frozenset(named))


def values_of(result: Any, signature: Signature, num_answers: int) -> list[float | str | None]:
    """Return a score for each answer of a call: None if it was not scored, a text if the result is unusable."""
    if signature.form != "trl":
        result = [result["score"] if isinstance(result, Mapping) and "score" in result else result]
    elif hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != num_answers:
        got = f"{len(result):,} scores" if isinstance(result, list | tuple) else type(result).__name__
        return [f"it returned {got}; expected a list of {num_answers}"] * num_answers
    return [value_of(each) for each in result]


def value_of(result: Any) -> float | str | None:
    """Return a score, or a text that says why it is none."""
    if result is None:
        return None
    expected = "expected a finite number or None"
    if isinstance(result, str | bytes) or not hasattr(type(result), "__float__"):
        shown = f" {result[:60]!r}" if isinstance(result, str | bytes) else ""
        return f"it returned {type(result).__name__}{shown}; {expected}"
    try:
        value = float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return f"it returned {type(result).__name__} ({error}); {expected}"
    return value if math.isfinite(value) else f"it returned {value}; {expected}"
