"""What a Kubernetes cluster is given: valid by the published schemas, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.sections import Config, KubernetesConfig, LaunchConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines import kubernetes_manifest as manifest
from hpctrain.launch.runners.ticket import ADDRESS

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


def a_job(train_job: list[dict[str, Any]]) -> dict[str, Any]:
    """The Job that Kubeflow makes of a TrainJob, for the schema of Kubernetes."""
    (made,) = train_job[1]["spec"]["template"]["spec"]["replicatedJobs"]
    name = f"{train_job[2]['metadata']['name']}-{made['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, **made["template"]["metadata"]}} | {
        "spec": made["template"]["spec"]
    }


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


def test_a_train_job_makes_the_same_job_by_a_runtime_of_its_own() -> None:
    pods = dataclasses.replace(FULL, kind="TrainJob")
    secret, runtime, job = made(run(pods))
    assert job == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": made(run())[2]["metadata"],
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "digits-abc123"}
        },
    }
    assert (runtime["apiVersion"], runtime["kind"]) == (job["apiVersion"], "TrainingRuntime")
    assert runtime["metadata"]["name"] == secret["metadata"]["name"] == "digits-abc123"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    (each,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (each["name"], each["replicas"]) == ("node", 1)
    assert each["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec, plain = each["template"]["spec"], made(run())[2]["spec"]
    (container,), (of_plain,) = (some["template"]["spec"]["containers"] for some in (spec, plain))
    assert container["name"] == "node", "Kubeflow looks for it"
    address = {"name": ADDRESS, "value": "digits-abc123-node-0-0.digits-abc123:7777"}
    assert address in container["env"]
    container["env"] = of_plain["env"]
    assert spec == plain and is_valid([secret, a_job([secret, runtime, job])])


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_pods_command_is_sound(shell: str) -> None:
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", manifest.COMMAND], check=True)


def test_pods_live_until_their_ranks_have_saved() -> None:
    with pytest.raises(UserError, match=r"launch\.kubernetes\.grace_s 300 is too short for launch\.stop_grace_s 290"):
        made(run(stop_grace_s=290.0))
    pod = made(run(stop_grace_s=285.0))[2]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300


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
        ("memory", "512ki"),
        ("pod", {"containers": []}),
        ("shared_memory", "33Gi"),
        ("shared_memory", "34.4G"),
        *(("pod", {name: None}) for name in ("nodeSelecter", "node_selector", "toleration", "priorityClass")),
    ],
)
def test_wrong_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"launch\.kubernetes\.{key} "):
        made(run(dataclasses.replace(FULL, **{key: value})))  # type: ignore[arg-type]


def test_a_misspelt_field_is_answered_with_the_nearest_and_fields_of_a_later_kubernetes_pass() -> None:
    with pytest.raises(UserError) as caught:
        made(run(dataclasses.replace(FULL, pod={"nodeSelecter": {"pool": "gpu"}})))
    assert caught.value.fix == "did you mean nodeSelector?"
    pod = made(run(dataclasses.replace(FULL, pod={"evictionResponders": []})))[2]["spec"]["template"]["spec"]
    assert "evictionResponders" in pod


@pytest.mark.parametrize("shared", ["32Gi", "34.3G", "32768Mi", "34359738368"])
def test_shared_memory_up_to_the_pods_memory_is_rendered(shared: str) -> None:
    assert made(run(dataclasses.replace(FULL, shared_memory=shared)))


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


NAMES = st.one_of(HOSTILE, st.from_regex(r"\A[a-z][a-z0-9-]{0,60}[a-z0-9]\Z"), st.from_regex(r"\A[\w.-]{30,60}\Z"))
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def labels(value: Any) -> Iterator[str]:
    """All of a manifest."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from labels(each)
    yield from value.get("labels", {}).values() if isinstance(value, dict) else ()


@pytest.mark.parametrize("kind", manifest.KINDS)
@settings(max_examples=100, deadline=None)
@given(name=NAMES, folder=HOSTILE, nodes=st.integers(1, 9999))
def test_names_of_runs_make_valid_names_and_labels(kind: str, name: str, folder: str, nodes: int) -> None:
    """Kubernetes and JobSet add the numbers of jobs and pods, and five characters, to the names of pods."""
    try:
        config = run(dataclasses.replace(FULL, kind=kind), name)  # type: ignore[arg-type]
        launch = dataclasses.replace(config.launch, nodes=nodes)
        job = f"{config.name}-abc123"
        objects = manifest.objects(dataclasses.replace(config, launch=launch), job, folder, "ab" * 32)
    except UserError as error:
        assert "name" in str(error)
        return
    text = manifest.text(objects)
    assert text.isascii() and list(yaml.safe_load_all(text)) == objects
    host = manifest.KINDS[kind].pod_0.format(job=job).removesuffix("0") + str(nodes - 1)
    pod = f"{host}-abcde" if kind == "TrainJob" else host
    assert len(pod) <= 63 and LABEL.fullmatch(pod)
    assert all(LABEL.fullmatch(each["metadata"]["name"]) for each in objects)
    assert all(LABEL_VALUE.fullmatch(each) for each in labels(objects))
