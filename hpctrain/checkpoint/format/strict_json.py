"""Strict encoding and parsing of JSON, for untrusted input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hpctrain.checkpoint.format.layout import DamagedCheckpoint
from hpctrain.errors import UserError


def to_json(document: Mapping[str, Any]) -> bytes:
    """Encode compact JSON. Raises UserError if a value cannot be represented."""
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        fix = "pass dicts, lists, strings, finite numbers"
        raise UserError(f"the checkpoint's meta is not JSON: {error}", fix) from error


def parse_json(data: bytes, where: str) -> Any:
    """Parse strict JSON, without NaN, Infinity or numbers that overflow. Raises DamagedCheckpoint."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse(text)

    try:
        return json.loads(data, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is not valid JSON: {error}") from error


class JsonReader:
    """Reads typed values from a parsed JSON object; anything unexpected raises DamagedCheckpoint with the location."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        self.value = self._expect(dict, value, "an object")

    def _expect(self, kind: type, value: Any, what: str) -> Any:
        if type(value) is not kind:
            self.fail(f"{str(value)[:50]} is not {what}")
        return value

    def fail(self, problem: str) -> NoReturn:
        """Raise DamagedCheckpoint with the location."""
        raise DamagedCheckpoint(f"{self.where}: {problem}")

    def get(self, key: str, kind: type, what: str) -> Any:
        """A required value of exactly this type."""
        if key not in self.value:
            self.fail(f"{key} is missing")
        return self._expect(kind, self.value[key], f"{what} ({key})")

    def integer(self, key: str, least: int, most: int) -> int:
        """A required integer in a range."""
        return self.in_range(self.get(key, int, "a whole number"), least, most, key)

    def in_range(self, number: Any, least: int, most: int, what: str) -> int:
        """The number, if it is an integer in the range."""
        if type(number) is not int or not least <= number <= most:
            self.fail(f"{what} is {str(number)[:50]}, not a whole number from {least} to {most}")
        return int(number)

    def crc32(self) -> int:
        """The required value of ``crc32``, 8 hex digits."""
        text = self.get("crc32", str, "a string")
        if not is_hex(text, 8):
            self.fail("crc32 is not 8 hex digits")
        return int(text, 16)

    def list_of(self, key: str, convert: Callable[[Any, str], Any]) -> tuple[Any, ...]:
        """The converted items of a required list."""
        items = self.get(key, list, "a list")
        return tuple(convert(item, f"{self.where}, {key} {index}") for index, item in enumerate(items))


def is_hex(value: Any, digits: int) -> bool:
    """Whether a value is a string of this many hex digits."""
    return type(value) is str and len(value) == digits and not value.strip("0123456789abcdef")
