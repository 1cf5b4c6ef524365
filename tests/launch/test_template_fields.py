"""Templates have only fields that exist, and start again after status 75 alone.

The tables of fields were read off the packages that they name, and hold what the templates use of them.
"""

import re
from typing import Any

import pytest
from jsonschema import ValidationError, validate
from launch_templates import kubeflow, skypilot

STOPPED = 75


def only(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A JSON schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
LABELS = {"type": "object", "additionalProperties": TEXT}
CODES = {"type": "integer", "minimum": 0, "maximum": 255}

# sky/utils/schemas.py of skypilot 0.14.1: get_task_schema, get_resources_schema, get_storage_schema
SKYPILOT = only(
    name=TEXT,
    workdir=TEXT,
    num_nodes=NUMBER,
    envs={"type": "object", "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": TEXT}, "additionalProperties": False},
    resources=only(
        accelerators=TEXT,
        use_spot=FLAG,
        job_recovery=only(
            strategy={"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
            max_restarts_on_errors={"type": "integer", "minimum": 0},
            recover_on_exit_codes={"type": "array", "items": CODES, "uniqueItems": True},
        ),
    ),
    file_mounts={
        "type": "object",
        "patternProperties": {"^/": only(name=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]})},
        "additionalProperties": False,
    },
    setup=TEXT,
    run=TEXT,
)

# models of kubeflow_trainer_api 2.3.0: TrainerV1alpha1TrainingRuntime, ...TrainJob, JobsetV1alpha2FailurePolicy,
# IoK8sApiBatchV1JobSpec
POD_RULE = only(
    ("action",),
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=only(
        ("operator", "values"),
        containerName=TEXT,
        operator={"enum": ["In", "NotIn"]},
        values=many({"type": "integer", "minimum": 1, "maximum": 255}),
    ),
    onPodConditions=many(only(("type",), type=TEXT, status={"enum": ["True", "False", "Unknown"]})),
)
POD = only(
    ("containers",),
    restartPolicy={"const": "Never"},  # which a podFailurePolicy demands
    terminationGracePeriodSeconds=NUMBER,
    containers=many(
        only(
            ("name",), name=TEXT, image=TEXT, volumeMounts=many(only(("name", "mountPath"), name=TEXT, mountPath=TEXT))
        )
    ),
    volumes=many(only(("name",), name=TEXT, persistentVolumeClaim=only(("claimName",), claimName=TEXT))),
)
SET_RULE = only(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=many({"enum": ["PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"]}),
)
JOB = only(
    ("template",), backoffLimit=NUMBER, podFailurePolicy=only(("rules",), rules=many(POD_RULE)), template=only(spec=POD)
)
JOB_SET = only(
    failurePolicy=only(maxRestarts=NUMBER, rules=many(SET_RULE)),
    replicatedJobs=many(
        only(("name", "template"), name=TEXT, template=only(metadata=only(labels=LABELS), spec=JOB)),
    ),
)
API = {"const": "trainer.kubeflow.org/v1alpha1"}
KUBEFLOW = {
    "TrainingRuntime": only(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=API,
        kind=TEXT,
        metadata=only(name=TEXT, labels=LABELS),
        spec=only(mlPolicy=only(numNodes=NUMBER, torch=only()), template=only(spec=JOB_SET)),
    ),
    "TrainJob": only(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=API,
        kind=TEXT,
        metadata=only(name=TEXT),
        spec=only(
            ("runtimeRef",),
            runtimeRef=only(("name",), name=TEXT, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}),
            trainer=only(
                image=TEXT,
                numNodes=NUMBER,
                numProcPerNode=NUMBER,
                resourcesPerNode=only(limits={"type": "object"}),
                command=many(TEXT),
                args=many(TEXT),
            ),
        ),
    ),
}


def test_skypilot_has_the_fields_of_its_schema_and_recovers_from_75_alone():
    task = skypilot()
    validate(task, SKYPILOT)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 0
    with pytest.raises(ValidationError, match="recover_on_exit_code"):
        validate({**task, "resources": {"job_recovery": {"recover_on_exit_code": 75}}}, SKYPILOT)


def test_kubeflow_has_the_fields_of_its_models_and_restarts_after_75_alone():
    pages = kubeflow()
    assert pages.keys() == KUBEFLOW.keys()
    for kind, page in pages.items():
        validate(page, KUBEFLOW[kind])
    runtime, job = pages["TrainingRuntime"], pages["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    lost, others = node["podFailurePolicy"]["rules"]
    assert lost["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert others["onExitCodes"] == {"containerName": "node", "operator": "NotIn", "values": [STOPPED]}
    assert node["template"]["spec"]["containers"][0]["name"] == "node"
    command = job["spec"]["trainer"]["command"]
    grace_s = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", command[2])[1])
    assert grace_s < node["template"]["spec"]["terminationGracePeriodSeconds"]  # ranks are killed before the pod is
    with pytest.raises(ValidationError, match="podFailurePolicy"):  # which is none of a TrainJob's fields
        validate({**job, "spec": {**job["spec"], "podFailurePolicy": {}}}, KUBEFLOW["TrainJob"])
