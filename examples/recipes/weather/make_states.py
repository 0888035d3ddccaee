"""Writes synthetic fields to try the recipe: make_states.py TIMES [FIELDS ROWS COLUMNS]

Waves travel around the globe, each with its speed, so the next state follows from the present one.
"""

import sys

import h5py
import numpy as np


def write(path: str, times: int, fields: int, rows: int, columns: int, start: int) -> None:
    rng = np.random.default_rng(0)  # one climate in both files
    number, speed = rng.integers(1, 5, (fields, 3)), rng.uniform(0.1, 0.5, (fields, 3))
    phase, row = rng.uniform(0, 2 * np.pi, (fields, 3)), np.arange(rows)[:, None] / rows * np.pi
    longitude = 2 * np.pi * np.arange(columns) / columns
    with h5py.File(path, "w") as file:
        states = file.create_dataset("state", (times, fields, rows, columns), np.float32)
        for time in range(times):
            for field in range(fields):
                angles = number[field, :, None] * longitude - speed[field, :, None] * (start + time)
                waves = np.sin(angles + phase[field, :, None])
                states[time, field] = sum(np.sin((wave + 1) * row) * waves[wave] for wave in range(3))


if __name__ == "__main__":
    times, *shape = map(int, sys.argv[1:])
    fields, rows, columns = shape or (20, 360, 720)
    write("train.h5", times, fields, rows, columns, start=0)
    write("validation.h5", max(times // 10, 2), fields, rows, columns, start=10 * times)
