"""What helm makes of the chart's values, without a cluster. Skipped until a cluster test has compiled helm."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.eviction import PLUGIN_NAMES
from agent.config.loader import build_config
from agent.config.profiles import PROFILES, with_defaults
from agent.config.qos import RightHolders, RightsConfig
from agent.eviction import plugins
from agent.eviction.runner import EvictionRunner
from agent.reporter.successor import STATE_VOLUME
from api.eviction import TAINT_PREFIX
from cli.options import parse_listen_hosts
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.serving import parse_settings
from controller.settings import ControllerConfig
from deploy import chart
from deploy.build import profiles_text
from tests.builders.settings import parse_config
from tests.cluster.binaries import program_path

HELM = shutil.which("helm") or str(program_path("helm"))
needs_helm = pytest.mark.skipif(not Path(HELM).exists(), reason="helm is missing: make test-cluster compiles it")
PLUGINS = plugins.__name__
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
Manifest = dict[str, Any]


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *words], capture_output=True, text=True, check=False)


class Rendered:
    """The manifests of the chart for some values."""

    def __init__(self, values: Manifest, directory: Path, version: str = chart.KUBE_VERSION) -> None:
        (directory / "values.json").write_text(json.dumps(values))
        words = (
            "--namespace",
            "dioptase",
            "--kube-version",
            version,
            "--values",
            str(directory / "values.json"),
        )
        done = run_helm("template", "dioptase", str(chart.CHART_DIR), *words)
        self.errors = done.stderr
        decoded = (msgspec.yaml.decode(text) for text in done.stdout.split("\n---\n"))
        self.manifests: list[Manifest] = [manifest for manifest in decoded if manifest]

    def find(self, kind: str, name: str) -> Manifest:
        full_name = f"dioptase-{name}"
        (manifest,) = (each for each in self.manifests if (each["kind"], each["metadata"]["name"]) == (kind, full_name))
        return manifest

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.find("DaemonSet", "agent")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def environment(self) -> dict[str, Any]:
        return {item["name"]: item.get("value", item.get("valueFrom")) for item in self.container["env"]}

    def rights(self, component: str) -> set[tuple[str, str]]:
        rules = self.find("ClusterRole", component)["rules"]
        return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}

    @property
    def controller(self) -> ControllerConfig:
        text = self.find("ConfigMap", "controller")["data"]["controller.yaml"]
        return parse_settings(text, ControllerConfig)


@pytest.fixture
def render(tmp_path: Path) -> Any:
    def rendered(**values: Any) -> Rendered:
        chart_of_values = Rendered(values, tmp_path)
        assert chart_of_values.errors == ""
        return chart_of_values

    return rendered


EVICTS = {("pods/eviction", "create"), ("nodes", "patch")}
ALL_OF_EVICTION = EVICTS | {("pods", "get")}
BUDGETS = {("poddisruptionbudgets", "list")}
PUBLISHES = {("nodes/status", "patch")}


def test_profiles_of_the_chart_are_those_of_the_agent() -> None:
    assert chart.PROFILES_FILE.read_text() == profiles_text(), "run: python -m deploy.build"
    schema = json.loads((chart.CHART_DIR / "values.schema.json").read_text())
    assert schema["properties"]["profile"]["enum"] == list(PROFILES)


def test_copies_in_the_chart_equal_their_sources() -> None:
    """Helm reports every symbolic link of a chart with each command, so that there are copies."""
    assert [path for path in chart.CHART_DIR.rglob("*") if path.is_symlink()] == []
    files = chart.copied_files()
    assert len(files) > 25
    assert sorted(chart.copies()) == sorted(files), "run: python -m deploy.build"
    stale = [copy.name for copy, source in files.items() if copy.read_bytes() != source.read_bytes()]
    assert stale == [], "run: python -m deploy.build"


@needs_helm
def test_helm_has_nothing_to_report() -> None:
    """Such as `walk.go:75: found symbolic link in path`, which it prints for a chart with links."""
    done = run_helm("template", "dioptase", str(chart.CHART_DIR), "--kube-version", chart.KUBE_VERSION)
    assert (done.returncode, done.stderr) == (0, "")


@needs_helm
@pytest.mark.parametrize("profile", PROFILES)
def test_rights_follow_the_profile(render: Any, profile: str) -> None:
    rendered = render(profile=profile)
    assert {f"--profile={profile}", f"--act={PROFILES[profile].act.value}"} <= set(rendered.container["args"])
    agent, settings = rendered.rights("agent"), build_config(PROFILES[profile].settings, profile)
    assert (agent & EVICTS == EVICTS) == bool(settings.eviction.plugins)
    assert (agent & PUBLISHES == PUBLISHES) == settings.report.extended_resources
    if profile == "observe":
        assert not agent & (EVICTS | PUBLISHES)


@needs_helm
def test_colocate_is_the_default_and_needs_no_setting(render: Any) -> None:
    rendered = render()
    assert "--profile=colocate" in rendered.container["args"]
    file = parse_config(rendered.find("ConfigMap", "agent")["data"]["agent.yaml"].encode(), "agent.yaml")
    assert not file.report.extended_resources, "the profile says so, not the file"
    assert rendered.rights("agent") >= EVICTS | PUBLISHES
    assert rendered.controller.leftovers == ()
    assert ("nodes", "patch") not in rendered.rights("controller")


@needs_helm
@pytest.mark.parametrize(
    ("values", "evicts", "publishes"),
    [
        ({"agent": {"evictions": False}}, False, True),
        ({"agent": {"extendedResources": False}}, True, False),
        ({"agent": {"settings": {"eviction": {"plugins": []}}}}, False, True),
        ({"agent": {"settings": {"report": {"extendedResources": False}}}}, True, False),
        ({"profile": "observe", "agent": {"evictions": True}}, True, False),
        ({"profile": "observe", "agent": {"extendedResources": True}}, False, True),
        # Without writes every plugin runs dry, whatever names it.
        ({"profile": "observe", "agent": {"settings": {"eviction": {"pluginSockets": "/run/x"}}}}, False, False),
        ({"agent": {"act": "dry-run"}}, False, True),
        ({"agent": {"act": "off"}}, False, True),
        ({"agent": {"act": "dry-run", "evictions": True}}, True, True),
        (
            {"profile": "observe", "agent": {"act": "on", "settings": {"eviction": {"pluginSockets": "/run/x"}}}},
            True,
            False,
        ),
        ({"profile": "katalyst", "agent": {"evictions": False, "extendedResources": False}}, False, False),
    ],
)
def test_single_settings_override_the_profile(render: Any, values: Manifest, *, evicts: bool, publishes: bool) -> None:
    """In the agent, in its role, and in what the controller removes because agents do not write it any more."""
    rendered = render(**values)
    assert (rendered.rights("agent") & EVICTS, rendered.rights("agent") & PUBLISHES) == (
        EVICTS if evicts else set(),
        PUBLISHES if publishes else set(),
    )
    leftovers = {"reclaimed-resources"} - ({"reclaimed-resources"} if publishes else set())
    leftovers |= set() if evicts else {"eviction-taints"}
    assert set(rendered.controller.leftovers) == leftovers
    assert (("nodes", "patch") in rendered.rights("controller")) != evicts
    assert ("nodes/status", "patch") in rendered.rights("controller")
    profile = PROFILES[values.get("profile", "colocate")].settings
    file = msgspec.yaml.decode(rendered.find("ConfigMap", "agent")["data"]["agent.yaml"])
    config = build_config(with_defaults(file, profile), "merged")
    assert config.report.extended_resources is publishes
    if not evicts and "act" not in values.get("agent", {}):
        assert config.eviction.plugins == ()


OVERCOMMIT_RIGHTS = {
    ("nodeovercommitconfigs", "list"), ("nodeovercommitconfigs", "watch"), ("nodeovercommitconfigs/status", "patch")
}  # fmt: skip


@needs_helm
def test_the_rights_to_overcommit_come_with_the_controller_that_does(render: Any) -> None:
    controllers = ["kcc", "lifecycle", "overcommit"]
    without, rendered = render(), render(controller={"settings": {"controllers": controllers}})
    assert rendered.controller.controllers == tuple(controllers)
    assert rendered.rights("controller") - without.rights("controller") == OVERCOMMIT_RIGHTS | {("nodes", "patch")}
    assert "overcommit" not in without.controller.controllers


@needs_helm
def test_one_value_enables_the_descheduler_with_its_rights_and_the_settings_of_the_scheduler(render: Any) -> None:
    without = render()
    assert "descheduler" not in without.controller.controllers
    rendered = render(
        descheduler={
            "enabled": True,
            "settings": {"lowNodeLoad": {"lowThresholds": {"cpu": 20}, "highThresholds": {"cpu": 70}}},
        },
        scheduler={"enabled": True, "settings": {"load": {"thresholds": {"cpu": 60}}}},
    )
    added = rendered.rights("controller") - without.rights("controller")
    assert added == {("poddisruptionbudgets", "list"), ("poddisruptionbudgets", "watch")}
    assert rendered.controller.controllers == ("kcc", "lifecycle", "descheduler")
    settings = rendered.controller.descheduler
    assert (settings.lease, settings.low_node_load.high_thresholds) == ("dioptase-descheduler", {"cpu": 70})
    assert settings.scheduler == {"load": {"thresholds": {"cpu": 60}}}
    assert not settings.low_node_load.dry_run
    (leases,) = (
        rule["resourceNames"] for rule in rendered.find("Role", "controller")["rules"] if "patch" in rule["verbs"]
    )
    assert leases == ["dioptase-controller", "dioptase-evictions", "dioptase-descheduler"]
    agent = msgspec.yaml.decode(rendered.find("ConfigMap", "agent")["data"]["agent.yaml"])
    assert agent["report"]["nodeMetrics"] is True


@needs_helm
def test_the_descheduler_explains_only_where_agents_write_nothing(render: Any, tmp_path: Path) -> None:
    for values, dry_run in (({"profile": "observe"}, True), ({}, False)):
        rendered = render(descheduler={"enabled": True}, **values)
        assert rendered.controller.descheduler.low_node_load.dry_run is dry_run
    more = render(descheduler={"enabled": True}, controller={"settings": {"controllers": ["kcc", "overcommit"]}})
    assert more.controller.controllers == ("kcc", "overcommit", "descheduler")
    refused = Rendered({"controller": {"settings": {"controllers": ["kcc", "descheduler"]}}}, tmp_path)
    assert (
        "remove descheduler, and set descheduler.enabled=true, by which profile observe only explains" in refused.errors
    )


@needs_helm
@pytest.mark.parametrize(
    ("values", "evicts", "lists"),
    [
        ({}, True, False),
        ({"profile": "katalyst"}, True, False),
        ({"profile": "observe"}, False, False),
        ({"agent": {"evictions": True}}, True, True),
        ({"agent": {"evictions": False}}, False, False),
        ({"agent": {"settings": {"eviction": {"plugins": ["numa-cpu-pressure-plugin"]}}}}, True, False),
        ({"agent": {"settings": {"eviction": {"pluginSockets": "/run/x"}}}}, True, True),
        # The dry run of an external plugin receives budgets too.
        ({"profile": "observe", "agent": {"settings": {"eviction": {"pluginSockets": "/run/x"}}}}, False, True),
        ({"agent": {"act": "off", "settings": {"eviction": {"pluginSockets": "/run/x"}}}}, False, False),
    ],
)
def test_each_right_of_evictions_is_granted_only_to_agents_that_use_it(
    render: Any, values: Manifest, *, evicts: bool, lists: bool
) -> None:
    rights = render(**values).rights("agent")
    assert rights & (ALL_OF_EVICTION | BUDGETS) == (ALL_OF_EVICTION if evicts else set()) | (
        BUDGETS if lists else set()
    )


@needs_helm
@pytest.mark.parametrize("plugin", PLUGIN_NAMES)
def test_plugins_that_use_budgets_may_list_them(render: Any, plugin: str) -> None:
    settings = {"eviction": {"plugins": [plugin], "numaCpu": {"scorers": ["Usage", "WorkloadEvictionFrequency"]}}}
    runner = EvictionRunner(build_config(settings, "test"), None)
    assert (render(agent={"settings": settings}).rights("agent") >= BUDGETS) == runner.needs_records()
    assert runner.needs_records() == (plugin == "numa-cpu-pressure-plugin")


RIGHTS_AT_KUBELETS = {"nodes/proxy", "nodes/pods", "nodes/configz"}


@needs_helm
@pytest.mark.parametrize("version", ["1.26.0", "1.31.14", "1.32.9"])
def test_the_right_to_everything_at_kubelets_is_never_granted_without_a_choice(tmp_path: Path, version: str) -> None:
    refused = Rendered({}, tmp_path, version)
    assert refused.manifests == []
    assert f"a kubelet of Kubernetes v{version}" in refused.errors
    assert (
        "nodes/proxy, which also allows commands in any pod of any node. Set agent.kubelet.right=proxy"
        in refused.errors
    )
    for right, granted in (("proxy", {"nodes/proxy"}), ("pods", {"nodes/pods", "nodes/configz"})):
        chosen = Rendered({"agent": {"kubelet": {"right": right}}}, tmp_path, version)
        assert {resource for resource, _ in chosen.rights("agent")} & RIGHTS_AT_KUBELETS == granted


@needs_helm
@pytest.mark.parametrize("version", ["1.33.0", "1.34.4"])
def test_kubelets_with_separate_rights_grant_only_reads_of_pods_and_configuration(tmp_path: Path, version: str) -> None:
    rights = Rendered({}, tmp_path, version).rights("agent")
    assert {each for each in rights if each[0] in RIGHTS_AT_KUBELETS} == {
        ("nodes/pods", "get"),
        ("nodes/configz", "get"),
    }


@needs_helm
@pytest.mark.parametrize(
    ("listen", "version", "argument", "field"),
    [
        ("", "1.33.0", "$(NODE_ADDRESSES),127.0.0.1:9102", "status.hostIPs"),
        ("", "1.29.0", "$(NODE_ADDRESSES),127.0.0.1:9102", "status.hostIP"),
        ("0.0.0.0", "1.33.0", "0.0.0.0:9102", None),
        ("[::]", "1.33.0", "[::],127.0.0.1:9102", None),
        ("10.0.0.5", "1.33.0", "10.0.0.5,127.0.0.1:9102", None),
    ],
)
def test_agents_listen_on_their_nodes_addresses_and_answer_probes_on_loopback(
    tmp_path: Path, listen: str, version: str, argument: str, field: str | None
) -> None:
    rendered = Rendered({"agent": {"listen": listen, "kubelet": {"right": "pods"}}}, tmp_path, version)
    (given,) = [word for word in rendered.container["args"] if word.startswith("--listen=")]
    assert given == f"--listen={argument}"
    addresses = rendered.environment.get("NODE_ADDRESSES")
    assert addresses == (None if field is None else {"fieldRef": {"fieldPath": field}})
    probes = [rendered.container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {(probe["host"], probe["port"]) for probe in probes} == {("127.0.0.1", "metrics")}
    resolved = given.removeprefix("--listen=").replace("$(NODE_ADDRESSES)", "10.0.0.1,fd00::1")
    hosts, port = parse_listen_hosts(resolved)
    assert port == 9102
    assert {"127.0.0.1", "0.0.0.0"} & {*hosts}, "where the probes go"


@needs_helm
def test_the_controller_listens_on_its_pods_addresses(render: Any) -> None:
    spec = render(agent={"listen": "10.0.0.5"}).find("Deployment", "controller")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--listen=$(POD_ADDRESSES),127.0.0.1:9316" in container["args"]
    assert {"name": "POD_ADDRESSES", "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}} in container["env"]


@needs_helm
def test_the_values_without_a_runtime_mount_neither_its_socket_nor_nri(tmp_path: Path, render: Any) -> None:
    values = msgspec.yaml.decode((chart.CHART_DIR / "values-without-runtime.yaml").read_bytes())
    rendered = Rendered(values, tmp_path)
    assert rendered.errors == ""
    default = render()
    for before, kind in ((default.pod["volumes"], "volumes"), (default.container["volumeMounts"], "mounts")):
        after = rendered.pod["volumes"] if kind == "volumes" else rendered.container["volumeMounts"]
        assert {each["name"] for each in before} - {each["name"] for each in after} == {"runtime", "nri"}
    paths = [volume["hostPath"]["path"] for volume in rendered.pod["volumes"] if "hostPath" in volume]
    assert paths == ["/sys/fs/cgroup", "/var/lib/dioptase"]


@needs_helm
def test_the_controller_starts_on_a_node_with_a_taint_that_it_is_to_remove(render: Any) -> None:
    modules = (importlib.import_module(module.name) for module in pkgutil.iter_modules(plugins.__path__, f"{PLUGINS}."))
    conditions = {module.CONDITION for module in modules if hasattr(module, "CONDITION")}
    own = {"key": "example.com/batch", "operator": "Exists"}
    for tolerations in ([], [own]):
        spec = render(controller={"tolerations": tolerations}).find("Deployment", "controller")["spec"]["template"][
            "spec"
        ]
        expected = [{"key": f"{TAINT_PREFIX}{name}", "operator": "Exists"} for name in sorted(conditions)]
        assert spec["tolerations"] == [*expected, *tolerations]


@needs_helm
def test_an_agent_hands_over_to_the_next_pod_of_its_daemonset(render: Any) -> None:
    rendered = render(agent={"stateDir": "/data/dioptase"})
    words = {"--handover=dioptase/dioptase-agent", "--handover-state-dir=/data/dioptase"}
    assert words <= set(rendered.container["args"])
    assert rendered.find("DaemonSet", "agent")["metadata"]["namespace"] == "dioptase"
    (volume,) = [each for each in rendered.pod["volumes"] if each["name"] == STATE_VOLUME]
    assert volume["hostPath"]["path"] == "/data/dioptase"
    (rule,) = [each for each in rendered.find("Role", "agent")["rules"] if each["apiGroups"] == ["apps"]]
    assert (rule["resourceNames"], rule["verbs"]) == (["dioptase-agent"], ["get"])
    assert ("nodes", "get") in rendered.rights("agent")


@needs_helm
@pytest.mark.parametrize(
    ("values", "lease"),
    [
        ({}, "dioptase-evictions"),
        ({"controller": {"settings": {"evictionBudget": {"lease": "mine", "perMinute": 3}}}}, "mine"),
        ({"controller": {"enabled": False}}, ""),
    ],
)
def test_agents_count_evictions_in_the_lease_that_the_controller_renews(
    render: Any, values: Manifest, lease: str
) -> None:
    """Without a controller nothing would renew it, and agents would evict no pod."""
    rendered = render(**values)
    text = rendered.find("ConfigMap", "agent")["data"]["agent.yaml"]
    assert parse_config(text.encode(), "agent.yaml").eviction.budget_lease == (f"dioptase/{lease}" if lease else "")
    rules = [each for each in rendered.find("Role", "agent")["rules"] if each["resources"] == ["leases"]]
    assert [(each["resourceNames"], each["verbs"]) for each in rules] == (
        [([lease], ["get", "patch"])] if lease else []
    )
    if lease:
        assert rendered.controller.eviction_budget.lease == lease
        named = [each for each in rendered.find("Role", "controller")["rules"] if "resourceNames" in each]
        assert [(each["resourceNames"], each["verbs"]) for each in named] == [
            (["dioptase-controller", lease], ["get", "patch"])
        ]


@needs_helm
def test_agents_that_do_not_evict_have_no_right_to_the_budget(render: Any) -> None:
    rules = render(profile="observe").find("Role", "agent")["rules"]
    assert [each["resources"] for each in rules] == [["daemonsets"]]


@needs_helm
def test_malachites_api_is_served_on_the_address_that_katalyst_reads(render: Any) -> None:
    assert "--malachite=127.0.0.1:9002" in render(malachite={"enabled": True}).container["args"]
    assert not [word for word in render().container["args"] if "malachite" in word]


@needs_helm
def test_telemetry_is_sent_with_headers_from_a_secret(render: Any) -> None:
    assert not [name for name in render().environment if name.startswith("OTEL_")]
    otlp = {"endpoint": "https://otel:4318", "protocol": "http/protobuf", "headersSecret": {"name": "otel"}}
    environment = render(otlp=otlp).environment
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://otel:4318"
    assert environment["OTEL_EXPORTER_OTLP_PROTOCOL"] == "http/protobuf"
    assert environment["OTEL_EXPORTER_OTLP_HEADERS"] == {"secretKeyRef": {"name": "otel", "key": "headers"}}
    assert environment["POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in render(otlp={"endpoint": "http://otel:4317"}).environment


@needs_helm
def test_a_recording_has_its_volume(render: Any) -> None:
    rendered = render(recording={"enabled": True, "path": "/var/lib/rec", "maxMib": 64})
    assert {"--record=/recording", "--record-max-mib=64"} <= set(rendered.container["args"])
    assert {"name": "recording", "mountPath": "/recording"} in rendered.container["volumeMounts"]
    volume = {"name": "recording", "hostPath": {"path": "/var/lib/rec", "type": "DirectoryOrCreate"}}
    assert volume in rendered.pod["volumes"]


@needs_helm
def test_extras_of_the_agents_pod_come_last(render: Any) -> None:
    volume, mount = {"name": "more", "emptyDir": {}}, {"name": "more", "mountPath": "/more"}
    extras = {
        "extraArgs": ["--duration=60"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
    }
    rendered = render(agent=extras)
    assert rendered.container["args"][-1] == "--duration=60"
    assert rendered.container["env"][-1] == {"name": "A", "value": "b"}
    assert (rendered.pod["volumes"][-1], rendered.container["volumeMounts"][-1]) == (volume, mount)


@needs_helm
def test_an_image_by_digest_is_used_by_every_pod(render: Any) -> None:
    rendered = render(image={"repository": "r.example/dioptase", "tag": "1", "digest": DIGEST})
    images = {
        container["image"]
        for manifest in rendered.manifests
        for spec in (manifest.get("spec", {}).get("template", manifest).get("spec", {}),)
        for container in spec.get("containers", ())
    }
    assert images == {f"r.example/dioptase@{DIGEST}"}


@needs_helm
@pytest.mark.parametrize(
    ("values", "present", "absent"),
    [
        (
            (),
            ("profile colocate, which lends", "reclaimed_millicpu", "oomd-pressure", "profile=observe"),
            "may select online",
        ),
        (("profile=katalyst",), ("profile katalyst", "may select online pods, and taint"), "Malachite"),
        (("profile=observe",), ("Agents write to no cgroup (mode dry-run)", "profile=colocate"), "reclaimed_millicpu"),
        (("malachite.enabled=true", "recording.enabled=true"), ("127.0.0.1:9002", "at most 256 MiB"), "telemetry"),
        ((), ("Evictions of any pod", "AdminQoSConfiguration enables later", "agent.evictions=false"), "No evictions"),
        (
            ("agent.evictions=false",),
            ("No evictions. An AdminQoSConfiguration can", "agent.evictions=true"),
            "of any pod,",
        ),
        (
            ("profile=observe",),
            ("In mode dry-run agents evict no pod", "by nodes/pods and nodes/configz"),
            "agent.evictions",
        ),
        (
            (),
            ("by the runtime's socket and NRI: a process", "In earlier releases the default was every address"),
            "nodes/proxy",
        ),
        (("profile=observe",), ("by the runtime's socket: a process",), "NRI"),
        (
            ("agent.runtimeDir=", "agent.nriDir=", "agent.listen=0.0.0.0"),
            ("What the token of an agent allows",),
            "root on its own node",
        ),
        (
            ("webhooks.enabled=true", "webhooks.vpaValidation=false"),
            (
                "(pod-mutation, pod-validation, node-overcommit, config-validation)",
                "replaced by requests of reclaimed resources",
            ),
            "vpa-validation",
        ),
        (("agent.kubelet.right=proxy",), ("WARNING: commands in any pod of any node, by nodes/proxy",), "nodes/pods"),
    ],
)
@pytest.mark.parametrize("upgrade", [False, True])
def test_notes_say_what_changes_and_what_comes_next(
    tmp_path: Path, values: tuple[str, ...], present: tuple[str, ...], absent: str, upgrade: bool
) -> None:
    """Rendered as a manifest, because helm renders notes only on a cluster."""
    copy = tmp_path / "chart"
    shutil.copytree(chart.CHART_DIR, copy)
    shutil.move(copy / "templates/NOTES.txt", copy / "NOTES.txt")
    (copy / "templates/notes.yaml").write_text('notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n')
    words = [word for value in values for word in ("--set", value)]
    words += ["--show-only", "templates/notes.yaml", "--kube-version", chart.KUBE_VERSION]
    words += ["--is-upgrade"] if upgrade else []
    done = run_helm("template", "dioptase", str(copy), *words)
    assert done.stderr == ""
    notes = msgspec.yaml.decode(done.stdout)["notes"]
    assert "\nWhat changes on this cluster:\n  - " in notes
    assert re.match(rf"Dioptase \S+ is {'upgraded' if upgrade else 'installed'} in namespace default with", notes)
    # The last lines of helm's output, where a person looks first.
    commands = notes.rstrip().rpartition("\n\nNext:\n")[2].splitlines()
    assert [command.split()[:2] for command in commands] == [
        ["kubectl", "-n"],
        ["kubectl", "get"],
        ["kubectl", "dioptase"],
    ]
    assert [text for text in present if text not in notes] == []
    assert absent not in notes


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        {"profile": "other"},
        {"agent": {"evictions": "maybe"}},
        {"image": {"digest": "sha256:12"}},
        {"otlp": {"endpoint": "otel:4317"}},
        {"recording": {"maxMib": 1}},
        {"agent": {"extraArgs": ["word"]}},
        {"malachite": {"port": 9002}},
        {"metrics": {"profile": "tiny"}},
        {"rightsPolicy": "off"},
        *(
            {"metrics": {"interval": text}}
            for text in ("0s", "0ms", "61s", "60001ms", "2m", "1h", "15", "-5s", "1m30s")
        ),
    ],
)
def test_invalid_values_are_refused_by_the_schema(tmp_path: Path, values: Manifest) -> None:
    assert "values don't meet the specifications of the schema" in Rendered(values, tmp_path).errors


@needs_helm
@pytest.mark.parametrize("interval", ["1ms", "9999ms", "60000ms", "1s", "15s", "60s", "1m"])
def test_scrape_intervals_up_to_a_minute_are_accepted(render: Any, interval: str) -> None:
    rendered = render(metrics={"serviceMonitor": True, "interval": interval})
    assert rendered.find("ServiceMonitor", "agent")["spec"]["endpoints"][0]["interval"] == interval


@needs_helm
@pytest.mark.parametrize("name", ["rules", "dashboards"])
def test_alerts_and_dashboards_need_more_than_the_small_metrics(tmp_path: Path, name: str) -> None:
    refused = Rendered({"metrics": {"profile": "small", name: True}}, tmp_path)
    assert (
        "metrics.profile: small lacks metrics of the alerts and dashboards: set metrics.profile=standard"
        in refused.errors
    )
    for profile in ("standard", "full"):
        assert Rendered({"metrics": {"profile": profile, name: True}}, tmp_path).errors == ""
    assert Rendered({"metrics": {"profile": "small"}}, tmp_path).errors == ""


@needs_helm
def test_the_metric_profile_reaches_the_agent_and_relabelings_the_service_monitor(tmp_path: Path) -> None:
    drop = {"sourceLabels": ["__name__"], "regex": "dioptase_cgroup_load", "action": "drop"}
    metrics = {"profile": "small", "serviceMonitor": True, "metricRelabelings": [drop]}
    shown = Rendered({"metrics": metrics}, tmp_path)
    settings = shown.find("ConfigMap", "agent")["data"]["agent.yaml"]
    assert parse_config(settings.encode(), "agent.yaml").exporters.metric_profile == "small"
    assert shown.find("ServiceMonitor", "agent")["spec"]["endpoints"][0]["metricRelabelings"] == [drop]
    (tmp_path / "defaults").mkdir()
    defaults = Rendered({"metrics": {"serviceMonitor": True}}, tmp_path / "defaults")
    assert "metricRelabelings" not in defaults.find("ServiceMonitor", "agent")["spec"]["endpoints"][0]
    endpoints = [defaults.find("ServiceMonitor", name)["spec"]["endpoints"][0] for name in ("agent", "controller")]
    assert [each.get("honorLabels") for each in endpoints] == [True, None], (
        "namespace and pod are those of the measured pods"
    )


def policy_rights(rendered: Rendered) -> dict[str, str]:
    """Return the expression of each right in the admission policy, on one line."""
    variables = rendered.find("ValidatingAdmissionPolicy", "rights")["spec"]["variables"]
    names = {name for name, _ in RightsConfig().by_name()}
    return {each["name"]: " ".join(each["expression"].split()) for each in variables if each["name"] in names}


@needs_helm
def test_rights_of_the_policy_are_those_of_the_agents(render: Any) -> None:
    defaults = render()
    settings = parse_config(defaults.find("ConfigMap", "agent")["data"]["agent.yaml"].encode(), "agent.yaml").qos.rights
    expected = {
        name: f"request.namespace in {json.dumps(holders.namespaces, separators=(',', ':'))} || "
        f"variables.priorityClass in {json.dumps(holders.priority_classes)}"
        for name, holders in settings.by_name()
    }
    assert policy_rights(defaults) == expected
    assert dict(settings.by_name()) == {
        **dict(RightsConfig().by_name()),
        "systemCores": RightHolders(namespaces=("kube-system", "dioptase")),
    }, "the agent itself is system_cores"
    assert defaults.find("ValidatingAdmissionPolicyBinding", "rights")["spec"]["validationActions"] == ["Deny", "Audit"]


@needs_helm
def test_rights_of_the_settings_are_those_of_the_policy(render: Any) -> None:
    rights = {
        "oomPriority": {"namespaces": ["*"]},
        "systemCores": {"namespaces": ["infra"], "priorityClasses": ["*"]},
        "cpusetPool": {"priorityClasses": ["payments"]},
    }
    changed = render(agent={"settings": {"qos": {"rights": rights}}}, rightsPolicy="warn")
    expressions = policy_rights(changed)
    assert expressions["oomPriority"] == "true"
    assert expressions["systemCores"] == 'request.namespace in ["infra","dioptase"] || variables.priorityClass != ""'
    assert (
        expressions["cpusetPool"] == 'request.namespace in ["kube-system"] || variables.priorityClass in ["payments"]'
    )
    settings = parse_config(changed.find("ConfigMap", "agent")["data"]["agent.yaml"].encode(), "agent.yaml").qos.rights
    assert settings.system_cores.namespaces == ("infra", "dioptase"), "an agent is not refused by its own policy"
    assert changed.find("ValidatingAdmissionPolicyBinding", "rights")["spec"]["validationActions"] == ["Warn", "Audit"]


@needs_helm
@pytest.mark.parametrize("values", [{"rightsPolicy": "none"}, {"profile": "observe"}, {"agent": {"act": "dry-run"}}])
def test_there_is_no_policy_where_it_is_not_wanted_or_agents_do_not_act(render: Any, values: Manifest) -> None:
    names = {each["metadata"]["name"] for each in render(**values).manifests if "Policy" in each["kind"]}
    assert "dioptase-rights" not in names


@needs_helm
def test_the_kustomize_base_is_fresh() -> None:
    assert chart.render_base(HELM) == chart.KUSTOMIZE_BASE.read_text(), "run: python -m deploy.build HELM"


@needs_helm
def test_the_scheduler_is_rendered_only_if_enabled_with_settings_that_the_extender_accepts(tmp_path: Path) -> None:
    assert not [each for each in Rendered({}, tmp_path).manifests if each["metadata"]["name"].endswith("-scheduler")]
    values = {"scheduler": {"enabled": True, "settings": {"fit": {"strategy": "MostAllocated"}}, "port": 9400}}
    rendered = Rendered(values, tmp_path)
    agent = msgspec.yaml.decode(rendered.find("ConfigMap", "agent")["data"]["agent.yaml"])
    assert agent["report"]["nodeMetrics"] is True, "load and harm"
    data = rendered.find("ConfigMap", "scheduler")["data"]
    settings = parse_settings(data["scheduler.yaml"], SchedulerConfig)
    assert (settings.token_review, settings.fit.strategy) == (True, "MostAllocated")
    config = msgspec.yaml.decode(data["kube-scheduler.yaml"])
    (extender,) = config["extenders"]
    assert (extender["urlPrefix"], extender["nodeCacheCapable"]) == ("https://127.0.0.1:9400", True)
    assert "managedResources" not in extender, "taints, load and harm concern every pod of this scheduler"
    spec = rendered.find("Deployment", "scheduler")["spec"]["template"]["spec"]
    containers = {each["name"]: each for each in spec["containers"]}
    assert containers["kube-scheduler"]["image"] == f"registry.k8s.io/kube-scheduler:v{chart.KUBE_VERSION}"
    # 0.0.0.0 has no address of a cluster with IPv6 only, at which the kubelet probes it.
    assert containers["kube-scheduler"]["command"][-1] == "--bind-address=$(POD_IP)"
    assert containers["kube-scheduler"]["env"] == [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    ]
    hosts, port = parse_listen_hosts(
        containers["extender"]["args"][1].partition("=")[2].replace("$(POD_ADDRESSES)", "::1")
    )
    assert (hosts, port) == (("::1", "127.0.0.1"), 9400)
    rules = rendered.find("ClusterRole", "scheduler")["rules"]
    writes = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {each for each in writes if each[1] not in ("get", "list", "watch")} == {
        ("pods", "patch"), ("pods/binding", "create"), ("tokenreviews", "create"), ("subjectaccessreviews", "create"),
    }  # fmt: skip


@needs_helm
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"scheduler": {"enabled": True, "clientCASecret": "ca"}}, "set scheduler.replicas=1"),
        (
            {"scheduler": {"enabled": True, "clientCASecret": "ca", "replicas": 1}, "tls": {"enabled": False}},
            "set tls.enabled=true",
        ),
    ],
)
def test_other_schedulers_reach_one_extender_and_only_by_certificate(
    values: Manifest, expected: str, tmp_path: Path
) -> None:
    assert expected in Rendered(values, tmp_path).errors
    rendered = Rendered({"scheduler": {"enabled": True, "clientCASecret": "ca", "replicas": 1}}, tmp_path)
    web = msgspec.yaml.decode(rendered.find("ConfigMap", "scheduler")["data"]["web.yaml"])["tls_server_config"]
    assert (web["client_auth_type"], web["client_ca_file"]) == (
        "VerifyClientCertIfGiven", "/etc/dioptase/client-ca/ca.crt",
    )  # fmt: skip
    assert rendered.find("Deployment", "scheduler")["spec"]["strategy"] == {"type": "Recreate"}


def test_a_kube_scheduler_on_a_control_plane_reaches_the_extender_by_address(tmp_path: Path) -> None:
    """It runs in the host's network, where no name of a Service can be resolved, and where its address is that of a node."""
    scheduler = {"enabled": True, "clientCASecret": "ca", "replicas": 1, "port": 9400}
    scrapers = {"enabled": True, "from": [{"namespaceSelector": {}}]}
    rendered = Rendered({"scheduler": scheduler, "networkPolicy": scrapers}, tmp_path)
    service = rendered.find("Service", "scheduler-extender")["spec"]
    assert ("clusterIP" in service, service["ports"][0]["port"]) == (False, 9400)
    assert rendered.find("NetworkPolicy", "scheduler")["spec"]["ingress"] == [
        {"ports": [{"port": "metrics", "protocol": "TCP"}]}
    ]
    alone = Rendered({"scheduler": {"enabled": True}, "networkPolicy": scrapers}, tmp_path)
    assert "from" in alone.find("NetworkPolicy", "scheduler")["spec"]["ingress"][0]
    assert not [each for each in alone.manifests if each["metadata"]["name"].endswith("-extender")]
