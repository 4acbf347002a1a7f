"""`flatout VERB`: finds the verb's file, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from flatout import __version__
from flatout.api.commands import Verb, exit_code_of
from flatout.cli.parser import OVERRIDE, Parser, refuse_unknown_options
from flatout.cli.verbs import GUESTS, VERBS, all_verbs, find_verb
from flatout.environment import let_idle_threads_sleep
from flatout.errors import Fix, PreemptedError, UsageError, exits_refused, install_beside
from flatout.io.stop_signals import SIGNALS as STOP_SIGNALS
from flatout.io.stop_signals import end_threads_at_exit
from flatout.track.tolerant_stream import tolerant_output

# in the place of a configuration file: all settings are on the command line
NO_FILE = "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the process's exit code (0 done, 2 usage, 3 data, ... see flatout/errors.py)."""
    let_idle_threads_sleep()
    if argv is not None:
        return _run_verb(argv)
    exit_with = end_threads_at_exit()
    exit_with(code := _run_verb(sys.argv[1:]))
    if code == PreemptedError.exit_code:
        # Python restores the default action of handled signals while it exits, and a launcher may signal again then:
        # without this, "stopped and saved" would become "killed by SIGTERM"
        for number in {*STOP_SIGNALS} - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)
    if sys.argv[1:2] == ["track"]:
        # the clients of trackers may wait for ever in threads and exit handlers; everything is flushed
        os._exit(code)
    return code


def _run_verb(given: Sequence[str]) -> int:
    # --max_tokens means --max-tokens
    words = [re.sub(r"^--[a-z_]+", lambda option: option[0].replace("_", "-"), word) for word in given]
    is_help = not words or words[0] in ("help", "--help", "-h")
    if is_help and words[1:]:
        words, is_help = [words[1], "--help"], False
    with tolerant_output():
        if is_help:
            return exit_code_of(_print_overview)
        if words[0] == "--version":
            print(f"flatout {__version__}")
            return 0
        verb = VERBS.get(words[0])
        return exit_code_of(lambda: _parse_and_run(verb, words), verb.spell if verb else str)


def _parse_and_run(verb: Verb | None, words: Sequence[str]) -> int:
    if (verb := verb or find_verb(words[0])) is None:
        _refuse_verb(words)
    name, rest = verb.name, overrides_first(verb, words[1:]) if verb.takes_overrides else words[1:]
    what, example = f"{verb.help[:1].upper()}{verb.help[1:]}.", f"flatout {name} {verb.example}"
    parser = Parser(prog=f"flatout {name}", description=what, example=example)
    verb.arguments(parser)
    refuse_unknown_options(name, rest, parser, settings=verb.takes_overrides)
    args, left = parser.parse_known_args(rest)
    if left:
        args.parser.error(f"it has no place for {shlex.join(left)}")
    with exits_refused():
        return int(verb.run(args) or 0)


def _print_overview() -> int:
    verbs = all_verbs()
    lines = ["usage: flatout VERB ...", "", "Plan and run exact fine-tuning of transformers models."]
    for group in dict.fromkeys(verb.group for verb in verbs.values()):
        of_group = [verb for verb in verbs.values() if verb.group == group]
        lines += ["", f"{group}:", *(f"  {verb.name:<9} {verb.help}" for verb in of_group)]
    lines += ["", "`flatout VERB --help` has the options of a verb. For a start:"]
    print("\n".join([*lines, "  flatout train model=Qwen/Qwen3-0.6B data=chats.jsonl", "  flatout chat run"]))
    return 0


def _refuse_verb(words: Sequence[str]) -> NoReturn:
    from flatout.config.names import FOREIGN_VERBS, WITHOUT_VERB  # lazy, so that --help stays instant

    verb, other = f"there is no command {words[0]!r}", words[0].lower()
    if other in ("resume", "continue", "restart"):
        settings = shlex.quote(f"runs/{words[1] if words[1:] else 'RUN'}/config.yaml")
        raise UsageError(f"{verb}: training a run's config.yaml continues it, such as `flatout train {settings}`")
    if other in GUESTS:
        folder = GUESTS[other]
        raise UsageError(f"{other} is in flatout-{folder}, which is not installed", [Fix({}, install_beside(folder))])
    if other in WITHOUT_VERB:
        raise UsageError(f"{verb}: {WITHOUT_VERB[other]}")
    named, verbs = FOREIGN_VERBS.get(other), all_verbs()
    if near := [named] if named else difflib.get_close_matches(other, verbs, n=1):
        name, _, action = near[0].partition(" ")
        # of several actions, the example may have another
        example = verbs[name].example if name in verbs and verbs[name].example.startswith(action) else None
        shown = "" if example is None else f"\n  example: flatout {name} {example}".rstrip()
        raise UsageError(f"{verb}; did you mean {near[0]}?{shown}")
    if other.endswith((".yaml", ".yml")) or "=" in other:
        raise UsageError(f"{verb}; write a verb first, such as train")
    raise UsageError(f"{verb}; the verbs are {', '.join(verbs)}; `flatout --help` explains them")


def overrides_first(verb: Verb, words: Sequence[str]) -> list[str]:
    """Move `section.name=value` words right after the configuration, wherever they are among the options.

    argparse takes positional arguments only as one block: `plan run.yaml --ranks 2 lora.rank=8` would be an error.
    Without a configuration file, NO_FILE stands in its place.
    """
    overrides = [word for word in words if OVERRIDE.match(word)]
    rest = [word for word in words if not OVERRIDE.match(word)]
    is_named = verb.needs_file or any(word.endswith((".yaml", ".yml", ".py")) for word in rest)
    if overrides and not is_named and rest[:1] != [NO_FILE] and (not rest or rest[0].startswith("-")):
        rest = [NO_FILE, *rest]
    return [rest[0], *overrides, *rest[1:]] if rest and rest[0][:2] != "--" else [*words]


if __name__ == "__main__":
    sys.exit(main())
