"""The values of a run file: as YAML writes them, as its keys take them, and their types in words."""

from __future__ import annotations

import re
import types
import typing
from urllib.parse import unquote

import yaml

from hpctrain.errors import UserError
from hpctrain.system import bounded_yaml

UNIONS = (types.UnionType, typing.Union)
"""Origins of ``X | None``: a Literal makes the older one."""
USER = re.compile(r"[\w+.-]+://[^/?#@\s\[]*:(?!\d+[/?#])[^@\s]*@|(https?|s3a?|gs|az)://[^/?#@\s]+@")
"""A password, which may hold a slash (but no port), or a token in its place. The container of abfs://container@account
is none, nor is the user of a database."""
SECRET = re.compile(
    r"://\S*[?&;#][^=&\s]*(sig|signature|token|credential|passwo?r?d|secret|(api|access|secret|account)[-_]?key(id)?)=",
    re.IGNORECASE,
)
KEPT_BY_LIBRARIES = (
    "leave them out, and give them as the library of the store or server takes them, such as AWS_PROFILE or "
    "MLFLOW_TRACKING_TOKEN"
)
"""What to do with credentials."""
WORDS = {str: "text", int: "integer", float: "number", bool: "true or false"}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class RunFileLoader(bounded_yaml.BoundedLoader):
    """YAML with the scalars of version 1.2: ``off`` and ``01:30:00`` are text, ``1e-4`` is a number."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way; filled below)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[typing.Hashable, typing.Any]:
        """Refuses a key that stands twice, of which YAML would take the last."""
        seen: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if (first := seen.setdefault((key.tag, str(key.value)), key)) is not key:
                what = f"{key.value!r} is in line {first.start_mark.line + 1} already"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
]:
    _starts = [*_first.replace("\0", ""), *([""] if _tag == "null" else [])]
    RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _starts)


class RunFileDumper(yaml.SafeDumper):
    """Quotes text that RunFileLoader would read as something else."""

    yaml_implicit_resolvers = RunFileLoader.yaml_implicit_resolvers


def read_yaml(text: str) -> typing.Any:
    """The plain values of a YAML text."""
    return bounded_yaml.parse(text, RunFileLoader)


class Misfit(Exception):
    """A value that a key does not take."""

    def __init__(self, value: typing.Any) -> None:
        super().__init__(value)
        self.value = value


def of_word(word: str, kind: typing.Any) -> typing.Any:
    """What a word of the command line means to a key of this type: text as it stands, or YAML if it takes no text."""
    try:
        value = read_yaml(word)
    except yaml.YAMLError:
        value = word
    optional = typing.get_origin(kind) in UNIONS and str in typing.get_args(kind)
    return word if kind is str or (optional and value is not None) else value


def unquoted(value: typing.Any, kind: typing.Any) -> typing.Any:
    """What text means to a key that takes none: ``"3"`` is 3, ``1_000`` and ``on`` are what people mean by them."""
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) in UNIONS else kind
    if not isinstance(value, str) or inner in (str, typing.Any) or typing.get_origin(inner) is typing.Literal:
        return value
    if inner is bool and value in ("on", "off", "yes", "no"):
        return value in ("on", "yes")
    try:
        parsed = read_yaml(value)
        return inner(parsed) if inner in (int, float) and isinstance(parsed, str) else parsed
    except (yaml.YAMLError, ValueError):
        return value


def converted(value: typing.Any, kind: typing.Any) -> typing.Any:
    """The value as this type: integers may be numbers or text, lists become tuples, nothing an empty list or mapping.

    Args:
        value: plain values, as YAML and TOML give them.
        kind: the type of a field: str, int, float, bool, a Literal of texts, ``tuple[T, ...]``, ``dict[str, T]`` or
            Any; all but Any may be optional, or a Literal as well.

    Raises:
        Misfit: it cannot be one; of a list or mapping, the first item that is wrong.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is typing.Any:
        return value
    if origin in UNIONS:
        choices = (one for one in inner if typing.get_origin(one) is typing.Literal and value in typing.get_args(one))
        return None if value is None else converted(value, next(choices, inner[0]))
    if origin is tuple and isinstance(value, list | None):
        return tuple(converted(item, inner[0]) for item in value or ())
    if origin is dict and isinstance(value, dict | None):
        for key in value or {}:
            if type(key) is not inner[0]:
                raise Misfit(key)
        return {key: converted(item, inner[1]) for key, item in (value or {}).items()}
    if kind in (float, str) and type(value) is int:
        return kind(value)
    if type(value) is kind or (origin is typing.Literal and value in inner):
        return value
    raise Misfit(value)


def holds_credentials(text: str) -> bool:
    """Whether an address in a text has a password, a token or a signature."""
    return bool(USER.search(text) or SECRET.search(unquote(text)))


def refuse_credentials(text: object, what: str) -> None:
    """Raises UserError, which does not repeat it, if an address holds credentials."""
    if holds_credentials(str(text)):
        raise UserError(f"{what} contains credentials", KEPT_BY_LIBRARIES)


def to_give(kind: typing.Any) -> str:
    """The same with its article, to follow "give"."""
    words = in_words(kind)
    return {"integer": "an ", "number": "a ", "list": "a ", "mapping": "a "}.get(words.split()[0], "") + words


def json_type(kind: typing.Any) -> dict[str, typing.Any]:
    """The type of a field as JSON Schema. Text may be written as a number where YAML takes it for one."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return {"anyOf": [json_type(one) for one in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": json_type(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": json_type(inner[1])}
    return {"type": JSON_TYPES[kind]} if kind in JSON_TYPES else {}


def in_words(kind: typing.Any) -> str:
    """The type of a field for people: ``list of integer``; choices by name."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(in_words(one) for one in inner if one is not type(None))
    if origin is typing.Literal:
        return ", ".join(inner)
    if origin is tuple:
        return f"list of {in_words(inner[0])}"
    return "mapping" if origin is dict else WORDS[kind]
