"""The shell of a reader of docs/, with kubectl, helm and kubectl-dioptase on its PATH. helm installs the chart with values of
this machine: the image of this tree, the node's cgroup, a state directory, and that other tests keep the node busy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.binaries import compiled_program
from tests.cluster.cluster import Cluster
from tests.cluster.image_and_chart import IMAGE, SHARED_MACHINE, TAG
from tests.cluster.programs import CODE

_HELM = '#!/bin/sh\nif [ "$1" = install ]; then set -- "$@" --values {values}; fi\nexec {helm} "$@"\n'


def page_shell(
    cluster: Cluster, folder: Path, state: str, agent: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, str]:
    """Return the variables of the shell. `state` names the state directory; `agent` are further values of the agent, and
    `settings` further settings."""
    node = cluster.nodes[0]
    values = folder / "values.json"
    values.write_text(
        json.dumps(
            {
                "image": {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"},
                "agent": {
                    "stateDir": str(cluster.names.run / state),
                    "settings": {"advisor": SHARED_MACHINE, "kubelet": {"cgroupRoot": node.cgroup_root}, **settings},
                    **(agent or {}),
                },
            }
        )
    )
    helm = folder / "bin/helm"
    helm.parent.mkdir()
    helm.write_text(_HELM.format(values=values, helm=compiled_program("helm")))
    helm.chmod(0o755)
    path = [helm.parent, Path(sys.executable).parent, cluster.programs["kubectl"].parent, "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(map(str, path)), "KUBECONFIG": str(cluster.kubeconfig), "NODE": node.name,
        "HOME": str(folder), "PYTHONPATH": str(CODE),
    }  # fmt: skip
