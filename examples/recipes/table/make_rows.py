"""Writes train.csv and validation.csv to try the recipe: make_rows.py ROWS"""

import csv
import sys

import numpy as np


def write(path: str, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    age, hours, city, job = (
        rng.uniform(18, 80, rows), rng.normal(38, 8, rows), rng.integers(0, 30, rows), rng.integers(0, 8, rows)
    )  # fmt: skip
    score = np.sin(age / 9) + hours / 20 + np.cos(city) * (job % 3) - 1.9
    label = rng.random(rows) < 1 / (1 + np.exp(-3 * score))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "hours", "city", "job", "label"])
        writer.writerows(zip(age.round(1), hours.round(1), city, job, label.astype(int), strict=True))


if __name__ == "__main__":
    write("train.csv", int(sys.argv[1]), seed=0)
    write("validation.csv", max(int(sys.argv[1]) // 10, 100), seed=1)
