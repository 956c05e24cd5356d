"""The manifests in examples/kubernetes: their fields, against the schemas, and what pods read from them.

KUBERNETES_CRDS names a folder with the custom resource definitions of JobSet and PyTorchJob, as their
projects publish them; without it the manifests are only read. No cluster is needed.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from started import ROOT
from unisono.engine.environment import env

yaml = pytest.importorskip("yaml", reason="PyYAML is not here: pip install pyyaml")
MANIFESTS = ROOT / "examples" / "kubernetes"
KINDS: dict[str, Any] = {"integer": int, "string": str, "boolean": bool, "array": list, "object": dict}


def read(name: str) -> dict[str, Any]:
    """The last document of a manifest: the job."""
    found: list[dict[str, Any]] = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    return found[-1]


def schema_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """From the definition of its kind and version; skips where it is not there."""
    folder = os.environ.get("KUBERNETES_CRDS")
    if not folder:
        pytest.skip("no definitions of JobSet and PyTorchJob: set KUBERNETES_CRDS to a folder with them")
    for path in Path(folder).glob("*.yaml"):
        definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = definition["spec"]
        for version in spec["versions"] if spec["names"]["kind"] == manifest["kind"] else ():
            if f"{spec['group']}/{version['name']}" == manifest["apiVersion"]:
                found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
                return found
    pytest.fail(f"{folder} has no definition of {manifest['kind']} {manifest['apiVersion']}")


def faults(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """What the API server would refuse: unknown and missing fields, wrong types and values."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{where} is {value!r}"]
    kind = KINDS.get(schema.get("type", ""))
    if kind and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        return [f"{where} is {value!r}, expected {schema['type']}"]
    found = (
        [f"{where} is {value!r}, expected one of {schema['enum']}"]
        if value not in schema.get("enum", [value])
        else []
    )
    if isinstance(value, list):
        return found + [
            fault for i, one in enumerate(value) for fault in faults(one, schema["items"], f"{where}[{i}]")
        ]
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{where} lacks {name}" for name in schema.get("required", []) if name not in value]
        for name, one in value.items():
            inner = known.get(name, rest if isinstance(rest, dict) else None)
            if inner is not None:
                found += faults(one, inner, f"{where}.{name}")
            elif not (
                rest or schema.get("x-kubernetes-preserve-unknown-fields") or name == "metadata" or not known
            ):
                found.append(f"{where} has no field {name}")
    return found


@pytest.mark.parametrize("name", ["jobset", "pytorchjob"])
def test_the_manifest_fits_the_published_schema(name: str) -> None:
    manifest = read(name)
    schema = schema_of(manifest)
    assert faults(manifest, schema, name) == []
    broken = {**manifest, "spec": {**manifest["spec"], "replicas": 4}}
    assert faults(broken, schema, name) == [f"{name}.spec has no field replicas"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.parametrize("name", ["job", "jobset"])
def test_a_pod_of_an_indexed_job_reads_its_place(name: str) -> None:
    spec = read(name)["spec"]
    pods = spec if name == "job" else spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert pods["completionMode"] == "Indexed"
    for index in range(pods["completions"]):
        given = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
        place = env.read({**variables(container), **given, "UNISONO_TOKEN_FILE": ""})
        assert (place.rank, place.world_size, place.launcher) == (index, pods["parallelism"], "Kubernetes")
        first = {"job": "train-0.train", "jobset": "train-rank-0-0.train"}[name]
        assert (place.master_addr, place.master_port, place.kubernetes) == (first, 29500, True)


def test_a_pod_of_the_pytorchjob_reads_what_the_operator_sets() -> None:
    replicas = read("pytorchjob")["spec"]["pytorchReplicaSpecs"]
    assert [
        container["name"]
        for each in replicas.values()
        for container in each["template"]["spec"]["containers"]
    ] == ["pytorch"] * 2
    size = sum(each["replicas"] for each in replicas.values())
    for rank in range(size):
        operator = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": "23456"}
        address = {"MASTER_ADDR": "train-master-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        place = env.read({**operator, **address})
        assert (place.rank, place.world_size, place.master_addr) == (rank, 4, "train-master-0")
        assert place.kubernetes
