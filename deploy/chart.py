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
"""Version for which the base is rendered; older clusters need another right at kubelets (`agent.kubelet.right`)."""
NAMESPACE, TLS_SECRET = "dioptase", "dioptase-tls"
BASE_HEADER = "# Generated from deploy/helm/dioptase by `python -m deploy.build HELM`.\n"
PROFILES_FILE = CHART_DIR / "profiles.yaml"
COPIED = {"crds": (DEPLOY_DIR / "crds", "*.yaml"), "dashboards": (DEPLOY_DIR.parent / "dashboards", "*.json")}
"""Folders of the chart with copies of other files of the repository: source folder and pattern of the file names."""
RULES = "dashboards/rules.yaml"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"
_LINE = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z]+):(?: (?P<value>.+))?")


def render_base(helm: str) -> str:
    """Render the chart with its default values, except for the certificate, which helm generates and kustomize cannot."""
    command = [
        *(helm, "template", "dioptase", str(CHART_DIR), "--namespace", NAMESPACE, "--kube-version", KUBE_VERSION),
        *("--no-hooks", "--set", f"tls.secretName={TLS_SECRET}"),
    ]
    return BASE_HEADER + subprocess.run(command, check=True, capture_output=True, text=True).stdout


def copied_files() -> dict[Path, Path]:
    """Return the source of each copied file of the chart."""
    files = {
        CHART_DIR / folder / path.name: path
        for folder, (source, pattern) in COPIED.items()
        for path in source.glob(pattern)
    }
    return {**files, CHART_DIR / RULES: DEPLOY_DIR.parent / RULES}


def copies() -> list[Path]:
    """Return the files in the chart's folders of copies."""
    return [path for folder in COPIED for path in (CHART_DIR / folder).glob("*")]


def values_rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default and description (the comment above) of every value in a values file.

    Raises ValueError for a value without a description.
    """
    path: list[str] = []
    comment: list[str] = []
    closed = -1
    for line in text.split("\n\n", 1)[1].splitlines():
        if not line.strip():
            comment = []
        elif line.lstrip().startswith("#"):
            comment.append(line.strip()[2:])
        elif (match := _LINE.fullmatch(line)) is None:
            raise ValueError(f"values.yaml: {line!r}: a line that is neither a comment nor NAME: VALUE")
        else:
            depth = len(match["indent"]) // 2
            if 0 <= closed < depth:
                continue
            closed, path = -1, [*path[:depth], match["name"]]
            if comment:
                yield ".".join(path), match["value"] or "below", " ".join(comment)
                # A described value may span several lines, which are not values of their own.
                closed = depth if match["value"] is None else -1
            elif match["value"] is not None:
                raise ValueError(f"values.yaml: {'.'.join(path)}: has no comment")
            comment = []


def values_table(text: str) -> str:
    """Format the rows of `values_rows` as a Markdown table."""
    lines = [f"| `{path}` | {_value_cell(value)} | {meaning} |" for path, value, meaning in values_rows(text)]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *lines]) + "\n"


def insert_values_table(document: str, text: str) -> str:
    """Replace the table between the two marks in a document."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{values_table(text)}{END}{after}"


def _value_cell(value: str) -> str:
    return "" if value in ('""', "[]", "{}") else f"`{value}`" if value != "below" else "see the file"
