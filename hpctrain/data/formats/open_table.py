"""Opens tables of all kinds by address; Delta and Iceberg tables at one version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.data.formats.tables import (
    Part,
    Table,
    checksum,
    filesystem_of,
    filtered,
    is_remote,
    open_files,
    reading,
    shortened,
    table_of,
)
from hpctrain.errors import MissingExtra, UserError


def open_table(address: str, kind: str) -> Table:
    """Open a table: delta, iceberg, or files of another kind; see the function for each."""
    openers = {"delta": open_delta, "iceberg": open_iceberg}
    return openers[kind](address) if kind in openers else open_files(address, kind)


def open_delta(address: str) -> Table:
    """Open a Delta table.

    Args:
        address: path or URI, optionally followed by ``@`` and a version number; by default the newest version.

    Raises:
        UserError: the table or version does not exist, or uses an unsupported feature (deletion vectors).
    """
    uri, version = split(address)
    with opening(address, "deltalake"), reading(address, "a Delta table"):
        from deltalake import DeltaTable
        from pyarrow.fs import SubTreeFileSystem

        store, path = filesystem_of(uri)
        table = DeltaTable(uri, version=version)
        files = table.to_pyarrow_dataset(filesystem=SubTreeFileSystem(path, store))
        origin = {"kind": "delta", "uri": uri, "version": table.version()}
        return table_of(files, f"delta:{uri}@{table.version()}", origin, is_remote(uri))


def open_iceberg(address: str) -> Table:
    """Open an Iceberg table, with one part per data file.

    Args:
        address: ``catalog/namespace.table``, optionally followed by ``@`` and a snapshot ID; by default the newest.
            pyiceberg reads the catalog's location and credentials from .pyiceberg.yaml or its environment variables.

    Raises:
        UserError: the catalog, table or snapshot does not exist, or one of its files cannot be read.
    """
    where, snapshot_id = split(address)
    catalog, _, name = where.partition("/")
    with opening(address, "pyiceberg"), reading(address, "an Iceberg table"):
        from pyiceberg.catalog import load_catalog
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow

        table = load_catalog(catalog).load_table(name)
        snapshot = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
        if snapshot is None:
            raise UserError(f"{address} has no such snapshot", "name one that it has, or leave it out for the newest")
        snapshot_id = snapshot.snapshot_id
        whole = table.scan(snapshot_id=snapshot_id)
        tasks = sorted(whole.plan_files(), key=lambda task: str(task.file.file_path))

        def part(task: Any) -> Part:
            path, size = task.file.file_path, task.file.file_size_in_bytes

            def scan(columns: Sequence[str], expression: Any) -> Iterator[Any]:
                chosen = table.scan(snapshot_id=snapshot_id, selected_fields=tuple(columns)).projection()
                if len(table.io.new_input(path)) != size:
                    raise UserError(f"{path} has changed since the table's snapshot", "restore the file")
                for batch in ArrowScan(table.metadata, table.io, chosen, AlwaysTrue()).to_record_batches([task]):
                    yield from filtered(batch, expression)

            key = f"{path} {size} {[each.file_path for each in task.delete_files]}"
            return Part(path, key, None if task.delete_files else task.file.record_count, scan)

        files = [(each.file_path, each.file_size_in_bytes, "") for task in tasks for each in files_of(task)]
        origin = {
            "kind": "iceberg",
            "uri": where,
            "snapshot": snapshot_id,
            "files": len(files),
            "files_sha256": checksum(sorted(set(files))),
        }
        schema = schema_to_pyarrow(whole.projection(), include_field_ids=False)
        remote = any(is_remote(path) for path, _, _ in files)
        return Table(f"iceberg:{where}@{snapshot_id}", schema, [part(task) for task in tasks], origin, remote)


def files_of(task: Any) -> list[Any]:
    """A part's data file and its delete files."""
    return [task.file, *task.delete_files]


def split(address: str) -> tuple[str, int | None]:
    """Split an address into table and version; None if it has no version."""
    table, at, version = address.rpartition("@")
    return (table, int(version)) if at and version.isdecimal() else (address, None)


@contextlib.contextmanager
def opening(address: str, package: str) -> Iterator[None]:
    """Turn any error of a table library into a UserError, since those errors share no base class."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise MissingExtra(package, "lake") from error
    except Exception as error:
        fix = "correct the table and its version, and check the connection to it"
        raise UserError(f"{address} cannot be opened: {shortened(error)}", fix) from error
