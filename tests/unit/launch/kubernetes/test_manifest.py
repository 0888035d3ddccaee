"""What a Kubernetes cluster is given: valid by the published schemas, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.sections import Config, KubernetesConfig, LaunchConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.kubernetes import manifest

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

pytestmark = pytest.mark.slow

VERSIONS = ("1.31", "1.37")
FULL = KubernetesConfig(
    image="registry.example/train:1",
    namespace="team",
    volumes={"/runs": "claim", "/data": "other-claim"},
    memory="32Gi",
    gpus=2,
    scratch="100Gi",
    queue="team-queue",
    pod={"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
)


def run(pods: KubernetesConfig = FULL, name: str = "digits", **launch: Any) -> Config:
    settings = LaunchConfig(engine="kubernetes", nodes=3, ranks_per_node=2, kubernetes=pods, **launch)
    return Config(name=name, task="digits:build", train=TrainConfig(epochs=1, global_batch=48), launch=settings)


def made(config: Config) -> list[dict[str, Any]]:
    """As the cluster reads them."""
    return list(
        yaml.safe_load_all(manifest.text(manifest.objects(config, f"{config.name}-abc123", "/here", "ab" * 32)))
    )


def is_valid(objects: list[dict[str, Any]], version: str = VERSIONS[-1]) -> bool:
    try:
        for each in objects:
            kubernetes_validate.validate(each, version, strict=True)
    except kubernetes_validate.ValidationError:
        return False
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str) -> None:
    assert is_valid(made(run()), version)
    assert is_valid(made(run(KubernetesConfig(image="train", volumes={"/runs": "claim"}))), version)


PLANTED: list[Callable[[dict[str, Any]], Any]] = [
    lambda job: job["spec"].update(completionsMode="Indexed"),
    lambda job: job["spec"].update(backoffLimit="20"),
    lambda job: job["spec"]["successPolicy"]["rules"][0].update(succeededIndex="0"),
    lambda job: job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=["64"]),
    lambda job: job["spec"]["template"]["spec"].update(terminationGracePeriod=300),
    lambda job: job["spec"]["template"]["spec"]["containers"][0].update(
        securityContext={"allowPrivilegeEscalation": 0}
    ),
    lambda job: job["spec"]["template"]["spec"]["volumes"][0].update(persistentVolumeClaim={"claim": "claim"}),
    lambda job: job["metadata"].update(label={}),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_mistakes_are_found(plant: Callable[[dict[str, Any]], Any]) -> None:
    *others, job = made(run())
    wrong = copy.deepcopy(job)
    plant(wrong)
    assert is_valid([*others, job]) and not is_valid([wrong])


def test_what_a_job_is_made_of() -> None:
    secret, service, job = made(run())
    assert [each["kind"] for each in (secret, service, job)] == ["Secret", "Service", "Job"]
    assert {each["metadata"]["name"] for each in (secret, service, job)} == {"digits-abc123"}
    assert secret["stringData"]["key"] == "ab" * 32 and secret["immutable"]
    in_pods = yaml.safe_load(secret["stringData"]["config.yaml"])
    assert (in_pods["launch"]["engine"], in_pods["run_dir"]) == ("runners", "/runs/digits")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (3, 3, 20)
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob"]
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"} and pod["terminationGracePeriodSeconds"] == 300
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "32Gi", "nvidia.com/gpu": "2"}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {
        *("/runs", "/data", "/dev/shm", "/scratch", "/etc/hpctrain")
    }
    shm = next(each for each in pod["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_the_key_is_in_the_secret_alone() -> None:
    shown = manifest.text(manifest.objects(run(), "digits-abc123", "/here", ""))
    sent = manifest.text(manifest.objects(run(), "digits-abc123", "/here", "ab" * 32))
    assert "ab" * 32 not in shown and sent.count("ab" * 32) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((name, "a b") for name in manifest.PATTERNS),
        ("image", None),
        ("image", "train;rm"),
        ("namespace", "Team"),
        ("volumes", {}),
        ("volumes", {"runs": "claim"}),
        ("volumes", {"/etc": "claim"}),
        ("volumes", {"/runs/../etc": "claim"}),
        ("volumes", {"/runs": "My_Claim"}),
        ("port", 80),
        ("memory", "lots"),
        ("pod", {"containers": []}),
    ],
)
def test_wrong_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"launch\.kubernetes\.{key} "):
        made(run(dataclasses.replace(FULL, **{key: value})))  # type: ignore[arg-type]


def test_what_is_not_for_pods_is_refused() -> None:
    with pytest.raises(UserError, match=r"launch\.modules and launch\.setup"):
        made(run(modules=("cuda",)))


HOSTILE = st.one_of(
    st.text(max_size=70),
    st.from_regex(r"\A[a-z0-9./:_-]{1,60}\Z"),
    st.sampled_from(["", "-", "a\nb: c", "{{x}}", "$(id)", "'\"", "&a *a", "!!python/object", "null", "1e3", "\u0085"]),
)


@settings(max_examples=40, deadline=None)
@given(key=st.sampled_from([*manifest.PATTERNS, "claim", "folder", "name"]), value=HOSTILE)
def test_hostile_values_are_valid_or_refused(key: str, value: str) -> None:
    volumes = {value if key == "folder" else "/runs": value if key == "claim" else "claim"}
    other = {key: value} if key in manifest.PATTERNS else {}
    try:
        config = run(dataclasses.replace(FULL, volumes=volumes, **other), name=value if key == "name" else "digits")
        objects = manifest.objects(config, f"{config.name}-abc123", value, "ab" * 32)
    except UserError as error:
        assert key in str(error) or key in ("claim", "folder")
        return
    assert list(yaml.safe_load_all(manifest.text(objects))) == objects and is_valid(objects)
