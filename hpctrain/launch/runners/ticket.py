"""How nodes find their supervisor and trust it: addresses, a port and a key, in a file or in two variables."""

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
"""Variable with the key in hexadecimal digits, 32 or more of them."""
ADDRESS = "HPCTRAIN_NODE_ADDRESS"
"""Variable with host:port of the supervisor, which listens on that port; or with several hosts, host,host:port."""
KEY_BYTES = 32


@dataclass(frozen=True)
class Ticket:
    """What a node needs."""

    addresses: tuple[str, ...]
    """Of the supervisor's host, tried in this order."""
    port: int
    """0 for a supervisor that takes a free one."""
    key: bytes

    @property
    def variables(self) -> dict[str, str]:
        """From which ``of_environment`` makes it."""
        return {KEY: self.key.hex(), ADDRESS: f"{','.join(self.addresses)}:{self.port}"}

    def write(self, path: Path, lives: Callable[[Ticket], bool] = lambda other: False) -> None:
        """Only this user can read it.

        Args:
            path: of the file.
            lives: whether another ticket, which is there, must stay.

        Raises:
            UserError: the file cannot be written, or is that of a run that lives.
        """
        taken = UserError(
            f"launch.ticket: {path} is that of another run, which lives", "name another file for this run"
        )
        old = _found(path)
        if old is not None and lives(old):
            raise taken
        with file_errors(f"launch.ticket: {path}", "name a file that can be written"):
            if path.is_file():  # of several that find a dead run's, one gets it
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
        """Unless it is another run's by now."""
        if _found(path) == self:
            path.unlink(missing_ok=True)


def read(path: Path) -> Ticket:
    """Raises OSError: there is none yet; UserError: it is not this user's alone, or no ticket."""
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
    """None if there is no ticket that can be read."""
    try:
        return read(path)
    except (OSError, UserError):
        return None


def of_environment(environment: Mapping[str, str]) -> Ticket | None:
    """From the two variables; None without a key. Raises UserError: they make no sense."""
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
    """For a supervisor on this machine, with a new key; nodes try fast networks first, and this machine at last."""
    found = sorted(interfaces(), key=lambda interface: interface.speed, reverse=True)
    return Ticket((*(interface.address for interface in found), LOOPBACK), 0, secrets.token_bytes(KEY_BYTES))
