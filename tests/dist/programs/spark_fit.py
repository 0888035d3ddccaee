"""A Spark program that trains on one of its DataFrames, and again with another; prints the results.

python spark_fit.py RUN: the run as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

import hpctrain


def main(run: dict[str, Any]) -> None:
    random = np.random.default_rng(0).normal(size=(64, 4))
    rows = [(x.tolist(), float(x.sum())) for x in random]
    settings = {"spark.ui.enabled": "false", "spark.executor.memory": "512m", "spark.driver.memory": "512m"}
    builder = SparkSession.builder.master("local-cluster[1,1,600]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    table = session.createDataFrame(rows, "x array<double>, y double")
    told: list[dict[str, Any]] = []
    result = hpctrain.spark.fit(run, table, report=told.append)
    again = hpctrain.spark.fit(run, table.limit(1))  # the run has finished: nothing is trained, and its data are kept
    session.stop()
    assert again == result
    print(json.dumps([told, result.metrics, str(result.checkpoint), str(result.best)]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
