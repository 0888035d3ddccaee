"""Tickets, by which nodes find and trust their supervisor: addresses, port and key, in a file or in two variables."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError, file_errors
from hpctrain.system.address import LOOPBACK, interfaces
from hpctrain.system.files import open_file, replacement

KEY = "HPCTRAIN_NODE_KEY"
"""Environment variable with the key: 32 hexadecimal digits or more."""
ADDRESS = "HPCTRAIN_NODE_ADDRESS"
"""Environment variable with the supervisor's address, host:port or host,host:port; it listens on that port."""
KEY_BYTES = 32


@dataclass(frozen=True)
class Ticket:
    """What a node needs to connect to its supervisor."""

    addresses: tuple[str, ...]
    """Addresses of the supervisor's host, in the order in which to try them."""
    port: int
    """Port of the supervisor; 0 for any free one."""
    key: bytes

    @property
    def variables(self) -> dict[str, str]:
        """The ticket as environment variables, which ``of_environment`` reads."""
        return {KEY: self.key.hex(), ADDRESS: f"{','.join(self.addresses)}:{self.port}"}

    def write(self, path: Path, lives: Callable[[Ticket], bool] = lambda other: False) -> None:
        """Writes the ticket to a file that only this user can read.

        Args:
            path: path of the file.
            lives: whether the supervisor of the ticket already in the file is alive.

        Raises:
            UserError: the file cannot be written, or belongs to a live run.
        """
        taken = UserError(f"launch.ticket: {path} belongs to another live run", "name another file for this run")
        old = _found(path)
        if old is not None and lives(old):
            raise taken
        with file_errors(f"launch.ticket: {path}", "name a file that can be written"):
            if path.is_file():  # if several runs find a dead run's ticket, only one must replace it
                aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
                path.rename(aside)
                if _found(aside) != old:  # another run was quicker
                    aside.rename(path)
                    raise taken
                aside.unlink()
            with replacement(path, first_wins=True) as new:
                new.chmod(0o600)
                new.write_text(json.dumps({"addresses": self.addresses, "port": self.port, "key": self.key.hex()}))
            if read(path) != self:
                raise taken

    def remove(self, path: Path) -> None:
        """Removes the file, unless it holds another run's ticket by now."""
        if _found(path) == self:
            path.unlink(missing_ok=True)


def read(path: Path) -> Ticket:
    """Reads a ticket from a file.

    Raises:
        OSError: there is no file yet.
        UserError: other users can read the file, or it is not a ticket.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "r") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UserError(f"{path} is open to other users, who could have read the key", "start the run again")
        try:
            given = json.load(file)
            return Ticket(tuple(map(str, given["addresses"])), int(given["port"]), bytes.fromhex(given["key"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a ticket", "name the file of launch.ticket") from error


def _found(path: Path) -> Ticket | None:
    """Reads a ticket; None if there is none that can be read."""
    try:
        return read(path)
    except (OSError, UserError):
        return None


def of_environment(environment: Mapping[str, str]) -> Ticket | None:
    """Reads a ticket from the two variables; None without a key. Raises UserError if they are not valid."""
    if KEY not in environment:
        return None
    host, _, port = environment.get(ADDRESS, "").rpartition(":")
    try:
        key = bytes.fromhex(environment[KEY])
        if len(key) < KEY_BYTES // 2 or not host:
            raise ValueError
        return Ticket(tuple(one.strip("[]") for one in host.split(",")), int(port), key)
    except ValueError:
        fix = f"{ADDRESS}=host:port, and {KEY}=32 hexadecimal digits or more"
        raise UserError(f"{KEY} and {ADDRESS} do not say how to find the supervisor", fix) from None


def fresh() -> Ticket:
    """Makes a ticket with a new key for a supervisor on this machine.

    Nodes will try its addresses on fast networks first, and loopback last.
    """
    found = sorted(interfaces(), key=lambda interface: interface.speed, reverse=True)
    return Ticket((*(interface.address for interface in found), LOOPBACK), 0, secrets.token_bytes(KEY_BYTES))
