"""Writes synthetic volumes to try the recipe: make_volumes.py VOLUMES [EDGE]. Balls in noise, and their masks."""

import sys

import h5py
import numpy as np


def write(path: str, volumes: int, edge: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.indices((edge, edge, edge), dtype=np.float32)
    with h5py.File(path, "w") as file:
        fields = file.create_dataset("field", (volumes, 1, edge, edge, edge), np.float32)
        masks = file.create_dataset("mask", (volumes, edge, edge, edge), np.uint8)
        for number in range(volumes):
            mask = np.zeros((edge, edge, edge), bool)
            for _ in range(3):
                centre = rng.uniform(0.2 * edge, 0.8 * edge, (3, 1, 1, 1))
                mask |= ((grid - centre) ** 2).sum(0) < (edge * rng.uniform(0.1, 0.2)) ** 2
            fields[number, 0] = mask + 0.7 * rng.normal(size=mask.shape)
            masks[number] = mask


if __name__ == "__main__":
    volumes, edge = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 160
    write("train.h5", volumes, edge, seed=0)
    write("validation.h5", max(volumes // 5, 2), edge, seed=1)
