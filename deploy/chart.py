"""Renders the kustomize base from the Helm chart, and the table of chart values in docs/install.md."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

DEPLOY_DIR = Path(__file__).parent
CHART_DIR = DEPLOY_DIR / "helm/dioptase"
KUSTOMIZE_BASE = DEPLOY_DIR / "kustomize/dioptase.yaml"
INSTALL_DOCUMENT = DEPLOY_DIR.parent / "docs/install.md"
KUBE_VERSION = "1.33.0"
"""For which the base is made; what is older needs another right at kubelets (`agent.kubelet.right`)."""
NAMESPACE, TLS_SECRET = "dioptase", "dioptase-tls"
BASE_HEADER = "# Made from deploy/helm/dioptase by `python -m deploy.build HELM`.\n"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"
_LINE = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z]+):(?: (?P<value>.+))?")


def render_base(helm: str) -> str:
    """The chart with its own values as manifests, but for the certificate, which helm makes and kustomize cannot."""
    said = [
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBE_VERSION,
        "--no-hooks",
        "--set",
        f"tls.secretName={TLS_SECRET}",
    ]
    command = [helm, "template", "dioptase", str(CHART_DIR), *said]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return BASE_HEADER + made


def values_rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Of a values file: path, default and meaning of everything that has a comment right above it. Raises ValueError for a
    value that has none."""
    path: list[str] = []
    comment: list[str] = []
    closed = -1
    for line in text.split("\n\n", 1)[1].splitlines():
        if not line.strip():
            comment = []
        elif line.lstrip().startswith("#"):
            comment.append(line.strip()[2:])
        elif (found := _LINE.fullmatch(line)) is None:
            raise ValueError(f"values.yaml: {line!r}: a line that is neither a comment nor NAME: VALUE")
        else:
            depth = len(found["indent"]) // 2
            if 0 <= closed < depth:
                continue
            closed, path = -1, [*path[:depth], found["name"]]
            if comment:
                yield ".".join(path), found["value"] or "below", " ".join(comment)
                # What is one value may go over several lines.
                closed = depth if found["value"] is None else -1
            elif found["value"] is not None:
                raise ValueError(f"values.yaml: {'.'.join(path)}: has no comment")
            comment = []


def values_table(text: str) -> str:
    """The same in Markdown."""
    lines = [f"| `{path}` | {_value_cell(value)} | {meaning} |" for path, value, meaning in values_rows(text)]
    return "\n".join(["| value | unless set | meaning |", "|---|---|---|", *lines]) + "\n"


def insert_values_table(document: str, text: str) -> str:
    """The document with the table of these values between its two marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{values_table(text)}{END}{after}"


def _value_cell(value: str) -> str:
    return "" if value in ('""', "[]", "{}") else f"`{value}`" if value != "below" else "see the file"
