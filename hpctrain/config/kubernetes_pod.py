"""Checks what a run file says about its pods: names of fields, and quantities against each other. Pure."""

from __future__ import annotations

import difflib

from hpctrain.config.sections import KubernetesConfig
from hpctrain.errors import UserError

FIELDS = frozenset((
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy",
    "enableServiceLinks", "ephemeralContainers", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers",
    "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os",
    "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims",
    "resources", "runtimeClassName", "schedulerName", "schedulingGates", "serviceAccount", "serviceAccountName",
    "setHostnameAsFQDN", "shareProcessNamespace", "tolerations", "topologySpreadConstraints", "workloadRef",
))  # fmt: skip
"""Fields of a pod's spec that a run file may give."""
ALIKE = 0.8
"""Similarity (of 1) to one of these from which another name is a misspelling, not a field of a later Kubernetes."""
SCALES = "m kMGTPE"
"""Units of quantities, a power of 1000 each (of 1024 before an i), from the power -1."""


def check_pod(given: KubernetesConfig) -> None:
    """Raises UserError for a misspelt field of the pod's spec, or more shared memory than memory.

    Args:
        given: the section, whose quantities are valid.
    """
    for key in sorted(given.pod.keys() - FIELDS):
        if close := difflib.get_close_matches(key, FIELDS, n=1, cutoff=ALIKE):
            raise UserError(f"launch.kubernetes.pod has {key}, which no pod has", f"did you mean {close[0]}?")
    if given.memory and amount(given.shared_memory) > amount(given.memory):
        what = f"launch.kubernetes.shared_memory {given.shared_memory} is more than the pod's memory {given.memory}"
        raise UserError(what, "raise launch.kubernetes.memory, in which shared memory counts, or lower shared_memory")


def amount(quantity: str) -> float:
    """The number that a quantity of Kubernetes stands for: 2**34 for 16Gi."""
    number = quantity.rstrip(f"{SCALES}Ki")
    unit = quantity.removeprefix(number)
    power = SCALES.index(unit[:1].replace("K", "k") or " ") - 1
    return float(number) * (1024.0 if unit.endswith("i") else 1000.0) ** power
