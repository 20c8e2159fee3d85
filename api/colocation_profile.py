"""ColocationProfile: turns plain pods of selected namespaces into reclaimed pods when they are created.
It has the meaning of Koordinator's ClusterColocationProfile (config.koordinator.sh), which the webhooks read too.
"""

from __future__ import annotations

from api.katalyst.ihpa import LabelSelector
from api.katalyst.kinds import KatalystKind, KindVersion, PrinterColumn
from api.katalyst.meta import CustomResource, KatalystStruct, Percent

PROFILE_GROUP, PROFILE_VERSION = "colocation.dioptase.io", "v1alpha1"
DRAW_KEY = "dioptase.io/colocation-draw"
"""Pod annotation: number from 0 to 99 that decides about profiles with a percentage. A profile applies if it is below."""
APPLIED_KEY = "dioptase.io/colocation-profiles"
"""Pod annotation: names of the profiles that were applied, in their order."""


class ColocationProfileSpec(KatalystStruct, frozen=True, kw_only=True):
    """Pods that become reclaimed, and what is set on them. A pod that states another QoS level keeps it."""

    namespace_selector: LabelSelector | None = None
    """Labels of the pod's namespace. Without it, every namespace; this profile then has to have a selector."""
    selector: LabelSelector | None = None
    """Labels of the pod. Without it, every pod of these namespaces."""
    percent: Percent | None = None
    """Share of the selected pods that become reclaimed, for canaries; 100 if unset. A pod with a fixed name keeps its share."""
    priority_class_name: str | None = None
    """PriorityClass of the pods; it has to exist, or the API server refuses the pods."""
    scheduler_name: str | None = None
    """Scheduler of the pods."""
    labels: dict[str, str] | None = None
    """Labels that are set on the pods."""
    annotations: dict[str, str] | None = None
    """Annotations that are set on the pods, such as dioptase.io/service-profile or katalyst.kubewharf.io/cpu_enhancement."""


class ColocationProfile(CustomResource, frozen=True, kw_only=True):
    """Plain pods of the selected namespaces become reclaimed pods."""

    spec: ColocationProfileSpec


COLOCATION_PROFILE_KIND = KatalystKind(
    PROFILE_GROUP,
    "ColocationProfile",
    "colocationprofiles",
    "cop",
    "Cluster",
    (
        KindVersion(
            PROFILE_VERSION,
            ColocationProfile,
            (
                PrinterColumn("PERCENT", "integer", ".spec.percent"),
                PrinterColumn("PRIORITY-CLASS", "string", ".spec.priorityClassName"),
                PrinterColumn("SCHEDULER", "string", ".spec.schedulerName"),
                PrinterColumn("AGE", "date", ".metadata.creationTimestamp"),
            ),
        ),
    ),
)
