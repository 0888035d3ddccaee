"""Runs on Kubernetes: ``manifest`` makes the objects for the cluster, ``cluster`` calls kubectl."""
