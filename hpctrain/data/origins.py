"""What data are, or are a copy of: tables, each at its version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpctrain.data.dataset import Dataset
from hpctrain.data.formats.concatenation import ConcatDataset
from hpctrain.data.formats.records import RecordDataset
from hpctrain.data.formats.sources import CalledDataset
from hpctrain.data.formats.table_dataset import TableDataset, TableRows

MOST_SOURCES = 100
"""That a record lists; there may be a table for each of very many packed files."""


def sources_of(dataset: Dataset) -> list[dict[str, Any]]:
    """The tables in order, each with its ``address`` and what ``Table.record`` says; none of data made otherwise.

    Args:
        dataset: tables, files that ``hpctrain data pack`` made from tables (named as ``packed``), or anything else.
    """
    found = {json.dumps(each): each for each in _sources(dataset)}
    return [{"address": address_of(each), **each} for each in list(found.values())[:MOST_SOURCES]]


def _sources(dataset: Any) -> list[dict[str, Any]]:
    if isinstance(dataset, CalledDataset):
        return _sources(dataset.dataset)
    if isinstance(dataset, TableDataset):
        return [dataset.table.record(len(dataset))]
    if isinstance(dataset, RecordDataset) and isinstance(dataset.records, TableRows):
        return [dataset.records.table.record(len(dataset))]
    if isinstance(dataset, ConcatDataset):
        return [each for part in dataset.parts for each in _sources(part)]
    from hpctrain.data.formats.hdf5 import Hdf5Dataset
    from hpctrain.data.packing.notes import packed_notes

    if not isinstance(dataset, Hdf5Dataset):
        return []
    return [{**source, "packed": str(dataset.path)} for source in packed_notes(dataset.path).get("sources", ())]


def address_of(source: Mapping[str, Any]) -> str:
    """Of a table, such as ``delta:s3://bucket/table@12``."""
    version = source.get("version", source.get("snapshot"))
    return str(source["uri"]) if version is None else f"{source['kind']}:{source['uri']}@{version}"
