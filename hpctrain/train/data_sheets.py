"""Peak rates of GPUs from their data sheets, in dense products of matrices; docs/performance.md names the sources."""

from __future__ import annotations

import re

SHEETS: dict[str, dict[str, float]] = {
    "B200": {"16 bits": 2250.0, "tf32": 1125.0, "fp32": 75.0},
    "GH200": {"16 bits": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200 NVL": {"16 bits": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H200": {"16 bits": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 NVL": {"16 bits": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H100 PCIe": {"16 bits": 756.0, "tf32": 378.0, "fp32": 51.0},
    "H100": {"16 bits": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"16 bits": 312.0, "tf32": 156.0, "fp32": 19.5},
    "L40S": {"16 bits": 362.05, "tf32": 183.0, "fp32": 91.6},
    "A40": {"16 bits": 149.7, "tf32": 74.8, "fp32": 37.4},
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    "V100": {"fp16": 125.0, "fp32": 15.7},
    "MI250X": {"16 bits": 191.5, "fp32": 47.9},  # of one die (GCD), which is a device; the sheet has both
    "MI300X": {"16 bits": 1307.4, "fp32": 163.4},
    "GPU Max 1550": {"16 bits": 419.0, "fp32": 26.0},  # of one tile, which is a device; the sheet has both
}
"""TFLOP/s by words of the device's name and by type; the first words that fit apply, so longer ones come first."""


def sheet_per_s(name: str, kind: str) -> float:
    """Operations per second that the data sheet of a device gives; 0 if it is not in the table, or a part (MIG).

    Args:
        name: the device's name, as its driver gives it.
        kind: ``bf16``, ``fp16``, ``tf32`` (products of float32 on tensor cores) or ``fp32``.
    """
    found = (rates for words, rates in SHEETS.items() if re.search(rf"\b{re.escape(words)}\b", name))
    rates = {} if re.search(r"\bMIG\b", name) else next(found, {})
    either = rates.get("16 bits", 0.0) if kind in ("bf16", "fp16") else 0.0
    return 1e12 * rates.get(kind, either)
