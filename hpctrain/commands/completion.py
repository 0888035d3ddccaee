"""``hpctrain completion``: a script for the shell's completion of commands, options and keys of the run file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence

from hpctrain.cli import COMMANDS, parser_of
from hpctrain.config.reference import keys
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), help='use as: eval "$(hpctrain completion bash)"')


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    foreign_text.show(SCRIPTS[args.shell]({name: list(dict.fromkeys(words_of(name))) for name in COMMANDS}), end="")
    return ExitCode.DONE


def words_of(command: str) -> Iterator[str]:
    """Yields subcommands and options, and keys of the run file if the command takes them."""
    parser = parser_of(command)
    yield from within(parser)
    if parser.get_default("overrides") is not None:
        yield from (f"--{key}" for key in keys())
        yield "--accept"


def within(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the words of a parser and its subcommands."""
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
            for inner in action.choices.values():
                yield from within(inner)
        elif action.choices:
            yield from map(str, action.choices)


def bash(words: Mapping[str, Sequence[str]]) -> str:
    """Returns the script for bash."""
    lines = [
        "_hpctrain() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" words=""',
        '    case "${COMP_WORDS[1]}" in',
        *[f"        {name}) words={shlex.quote(' '.join(found))} ;;" for name, found in words.items()],
        "    esac",
        f'    [ "$COMP_CWORD" -gt 1 ] || words={shlex.quote(" ".join(words))}',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '    if [ "$COMP_CWORD" -gt 1 ] && [[ "$current" != -* ]]; then',
        '        COMPREPLY+=($(compgen -f -- "$current"))',
        "    fi",
        "}",
        "complete -o filenames -F _hpctrain hpctrain",
    ]
    return "\n".join(lines) + "\n"


def zsh(words: Mapping[str, Sequence[str]]) -> str:
    """Returns the script for zsh, which can load that for bash."""
    load = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
    return load + bash(words)


def fish(words: Mapping[str, Sequence[str]]) -> str:
    """Returns the script for fish."""
    lines = [
        f"complete -c hpctrain -n __fish_use_subcommand -f -a {name} -d {quoted(COMMANDS[name].help)}" for name in words
    ]
    for name, found in words.items():
        seen = quoted(f"__fish_seen_subcommand_from {name}")
        plain = " ".join(word for word in found if not word.startswith("--"))
        lines += [
            f"complete -c hpctrain -n {seen} -l {word.removeprefix('--')}" for word in found if word.startswith("--")
        ]
        lines += [f"complete -c hpctrain -n {seen} -a {quoted(plain)}"] if plain else []
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Quotes a text for fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
