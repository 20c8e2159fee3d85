"""What terminals call a cgroup: its pod and container where one is listed, else its path. Names are never trusted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.cells import cell_len, set_cell_size

from cli import words
from exporters.cgroup_view import ContainerView


def name_of(container: ContainerView) -> str:
    """The pod, and its container where that has another name; the path where no pod is listed."""
    if not container.pod:
        return words.clean(container.cgroup)
    text = words.clean(container.pod)
    if not container.pod.endswith(f"/{container.container}"):
        text += f" {words.clean(container.container)}"
    return text


def names_of(containers: Iterable[ContainerView]) -> Mapping[str, str]:
    """By path."""
    return {container.cgroup: name_of(container) for container in containers}


def fitted(text: str, width: int) -> str:
    """Exactly so wide. Pods differ at their beginnings, paths at their ends: that end is kept."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    if text.startswith("/"):
        kept = text[-width * 2 :]
        while cell_len(kept) > width - 1:
            kept = kept[1:]
        return set_cell_size("…" + kept, width)
    return set_cell_size(text[: width * 2], width - 1) + "…"
