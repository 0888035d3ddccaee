"""Images per second that one core decodes, crops and scales: rate.py SOURCE [SECONDS]"""

import sys
import time

import numpy as np
from images import opened, random_resized_crop


def images_per_s(source: str, seconds: float) -> float:
    data, rng, count = opened(source), np.random.default_rng(0), 0
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        encoded = data.read(np.array([count % len(data)]))
        random_resized_crop({"image": encoded["image"][0], "label": encoded["label"][0]}, rng, size=224)
        count += 1
    return count / (now - end + seconds)


if __name__ == "__main__":
    rate = images_per_s(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 5)
    print(f"{rate:.0f} images/s per core: a GPU that trains 2,500 images/s needs data.workers: {2500 / rate:.0f}")
