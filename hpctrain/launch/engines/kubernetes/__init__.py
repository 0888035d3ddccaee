"""Runs on Kubernetes: ``manifest`` is what the cluster is given, ``cluster`` asks it by kubectl."""
