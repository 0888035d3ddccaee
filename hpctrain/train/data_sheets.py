"""Peak rates of GPUs from their data sheets, in dense products of matrices; docs/performance.md names the sources."""

from __future__ import annotations

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
"""TFLOP/s by a part of the device's name and by type; the first name that fits applies, so longer ones come first."""


def sheet_per_s(name: str, kind: str) -> float:
    """Operations per second that the data sheet of a device gives; 0 if it is not in the table.

    Args:
        name: the device's name, as its driver gives it.
        kind: ``bf16``, ``fp16``, ``tf32`` (products of float32 on tensor cores) or ``fp32``.
    """
    rates = next((rates for part, rates in SHEETS.items() if part in name), {})
    either = rates.get("16 bits", 0.0) if kind in ("bf16", "fp16") else 0.0
    return 1e12 * rates.get(kind, either)
