"""Manifests for Kubernetes: an Indexed Job, and what its pods need to find each other."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
from typing import Any, ClassVar

from constrainx.errors import ArgumentError
from constrainx.launch._duration import read_seconds
from constrainx.launch._job import Job, check_word
from constrainx.launch._yaml import write_documents

RBAC = "rbac.authorization.k8s.io"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Writes a Job with one pod per node, whose pods are replaced until the run has ended.

    Attributes:
        container_image: the image with constrainx and `jax[k8s]`, such as REGISTRY/constrainx:1.
        namespace: of everything; that of the context if left out.
        claim: the persistent volume claim for the folders of runs, which must be ReadWriteMany.
        mount: where pods see that volume.
        time: how long the job may take in all, such as 7-00:00:00; without limit if left out.
        notice: seconds that a pod has to save when it must go.
        cpus: of each pod.
        memory: of each pod, such as 512Gi.
        retries: how often a pod may fail with an error of its own.
    """

    suffix: ClassVar[str] = ".kubernetes.yaml"
    tool: ClassVar[str] = "kubectl, https://kubernetes.io/docs/tasks/tools"

    container_image: str
    namespace: str | None = None
    claim: str = "runs"
    mount: str = "/runs"
    time: str | None = None
    notice: int = 120
    cpus: int | None = None
    memory: str | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        for option in ("container_image", "namespace", "claim", "mount", "memory"):
            check_word(f"--{option.replace('_', '-')}", getattr(self, option))

    def place(self, run: pathlib.Path) -> pathlib.Path:
        """On the shared volume, in place of the folder "runs"."""
        return pathlib.Path(self.mount, *run.parts[1:])

    def write(self, job: Job) -> str:
        """The manifest, whose objects all have the job's name."""
        if not job.run.is_relative_to(self.mount):
            raise ArgumentError(
                f"`--run {job.run}` must be on the shared volume, so below `--mount {self.mount}`."
            )
        parts = (*self._grant(job), self._serve(job), self._run(job))
        return write_documents(job.written_by, *parts)

    def submission(self, file: pathlib.Path) -> list[str]:
        """By `kubectl`."""
        return ["kubectl", "apply", "-f", str(file)]

    def _grant(self, job: Job) -> list[dict[str, Any]]:
        """An account for the pods, which JAX lets look up their own pod and job."""
        account = {"kind": "ServiceAccount", "name": job.name}
        reading = ["get", "list"]
        return [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": self._name(job)},
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "Role",
                "metadata": self._name(job),
                "rules": [
                    {"apiGroups": [""], "resources": ["pods", "services"], "verbs": reading},
                    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": [*reading]},
                ],
            },
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "RoleBinding",
                "metadata": self._name(job),
                "subjects": [account],
                "roleRef": {"kind": "Role", "name": job.name, "apiGroup": RBAC},
            },
        ]

    def _serve(self, job: Job) -> dict[str, Any]:
        """A headless service, by which pods find the first one by name."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._name(job),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"job-name": job.name},
            },
        }

    def _run(self, job: Job) -> dict[str, Any]:
        from constrainx.runtime import ABORTED, STOPPED

        # Disturbances from outside: asked to stop, and saved; a peer was lost; before training.
        disturbed = [STOPPED, int(ABORTED), 128 + signal.SIGTERM]
        condition = {"type": "DisruptionTarget", "status": "True"}
        deadline = {} if self.time is None else {"activeDeadlineSeconds": read_seconds(self.time)}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._name(job),
            "spec": {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                **deadline,
                # Process 0 ends well only once all is written.
                "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
                "backoffLimit": self.retries,
                "podFailurePolicy": {
                    "rules": [
                        {"action": "Ignore", "onPodConditions": [condition]},
                        {
                            "action": "Ignore",
                            "onExitCodes": {"operator": "In", "values": disturbed},
                        },
                    ]
                },
                "template": {"spec": self._describe_pod(job)},
            },
        }

    def _describe_pod(self, job: Job) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": job.gpus or None, "cpu": self.cpus, "memory": self.memory}
        return {
            "serviceAccountName": job.name,
            "subdomain": job.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.notice,
            "containers": [
                {
                    "name": "train",
                    "image": self.container_image,
                    "command": job.train(distributed="auto"),
                    "resources": {
                        "limits": {name: value for name, value in limits.items() if value}
                    },
                    "volumeMounts": [
                        {"name": "runs", "mountPath": self.mount},
                        # NCCL and data workers share more memory than containers have by default.
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }

    def _name(self, job: Job) -> dict[str, str]:
        place = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": job.name, **place}
