"""A LowNodeLoadArgs snippet of Koordinator works as it is, and invalid settings name the field and the remedy."""

from __future__ import annotations

import pytest

from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.serving import parse_settings
from controller.settings import ControllerConfig

SNIPPET = """
lowNodeLoad:
  apiVersion: descheduler/v1alpha2
  kind: LowNodeLoadArgs
  paused: false
  dryRun: false
  numberOfNodes: 2
  nodeMetricExpirationSeconds: 300
  evictableNamespaces:
    exclude: [kube-system, koordinator-system]
  nodeSelector:
    matchLabels: {pool: online}
  podSelectors:
  - name: web
    selector:
      matchExpressions: [{key: app, operator: In, values: [web]}]
  nodeFit: true
  useDeviationThresholds: false
  lowThresholds: {cpu: 20, memory: 30}
  highThresholds: {cpu: 50, memory: 60.5}
  resourceWeights: {cpu: 2, memory: 1}
  anomalyCondition: {timeout: 1m0s, consecutiveAbnormalities: 5, consecutiveNormalities: 3}
  detectorCacheTimeout: 5m0s
"""


def test_a_snippet_of_koordinator_is_accepted() -> None:
    args = parse_settings(SNIPPET, DeschedulerSettings).low_node_load
    assert (args.number_of_nodes, args.node_metric_expiration_seconds) == (2, 300)
    assert (args.low_thresholds, args.high_thresholds) == ({"cpu": 20, "memory": 30}, {"cpu": 50, "memory": 60.5})
    assert args.evictable_namespaces.exclude == ("kube-system", "koordinator-system")
    assert not args.evictable_namespaces.allows("kube-system")
    assert args.anomaly_condition.consecutive_abnormalities == 5
    assert args.resource_weights == {"cpu": 2, "memory": 1}


def test_the_defaults_are_koordinators() -> None:
    args = DeschedulerSettings().low_node_load
    assert (args.node_fit, args.dry_run, args.paused, args.number_of_nodes) == (True, False, False, 0)
    assert (args.node_metric_expiration_seconds, args.detector_cache_timeout) == (180, "5m0s")
    assert args.anomaly_condition.consecutive_normalities == 3
    assert (args.low_thresholds, args.high_thresholds) == ({}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lowNodeLoad: {lowThresholds: {cpu: 20}}",
         "lowNodeLoad: highThresholds has no cpu; a resource needs both thresholds, so add it or remove the other one"),
        ("lowNodeLoad: {highThresholds: {memory: 20}}",
         "lowNodeLoad: lowThresholds has no memory; a resource needs both thresholds, so add it or remove the other one"),
        ("lowNodeLoad: {lowThresholds: {cpu: 60}, highThresholds: {cpu: 50}}",
         "lowNodeLoad: lowThresholds.cpu is 60 and highThresholds.cpu 50: lower the first one"),
        ("lowNodeLoad: {lowThresholds: {gpu: 20}}",
         "lowNodeLoad.lowThresholds.gpu: a key: Invalid enum value 'gpu', choose from cpu, memory"),
        ("lowNodeLoad: {lowThresholds: {cpu: 101}}", "lowNodeLoad.lowThresholds.cpu: Expected `float` <= 100.0"),
        ("lowNodeLoad: {numberOfNodes: -1}", "lowNodeLoad.numberOfNodes: Expected `int` >= 0"),
        ("lowNodeLoad: {evictableNamespaces: {include: [a], exclude: [b]}}",
         "lowNodeLoad.evictableNamespaces: include and exclude are both set; remove one"),
        ("lowNodeLoad: {anomalyCondition: {consecutiveAbnormalities: 0}}",
         "lowNodeLoad.anomalyCondition.consecutiveAbnormalities: Expected `int` >= 1"),
        ("lowNodeLoad: {anomalyCondition: {timeout: 1 minute}}",
         "lowNodeLoad.anomalyCondition: timeout: '1 minute' is no duration such as 90s, 10m or 1h30m"),
        ("lowNodeLoad: {detectorCacheTimeout: '0'}",
         "lowNodeLoad: detectorCacheTimeout: '0' is not above 0; write a duration such as 5m0s"),
        ("lowNodeLoad: {nodeSelector: {matchExpressions: [{key: a, operator: Is}]}}",
         "lowNodeLoad: nodeSelector.matchExpressions[0].operator: 'Is' is unknown; use In, NotIn, Exists, DoesNotExist"),
        ("lowNodeLoad: {podSelectors: [{selector: {matchExpressions: [{key: a, operator: In}]}}]}",
         "lowNodeLoad: podSelectors[0].selector.matchExpressions[0].values: In has 0 values; write at least one"),
        ("lowNodeLoad: {kind: HighNodeLoadArgs}", "lowNodeLoad.kind: Invalid enum value 'HighNodeLoadArgs', choose from"),
        ("lowNodeLoad: {nodePools: []}", "lowNodeLoad: Object contains unknown field `nodePools`, choose from apiVersion"),
        ("maxNoOfPodsToEvictTotal: 0", "maxNoOfPodsToEvictTotal: Expected `int` >= 1"),
        ("scheduler: {load: {thresholds: {cpu: 200}}}",
         "top level: scheduler.load.thresholds.cpu: Expected `int` <= 100; see docs/scheduler.md"),
        ("intervalS: 0", "intervalS: Expected `float` >= 1.0"),
    ],
)  # fmt: skip
def test_invalid_settings_name_the_field_and_the_remedy(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_settings(text, DeschedulerSettings)
    assert str(caught.value).startswith(expected)


def test_low_may_exceed_high_as_deviations() -> None:
    text = "lowNodeLoad: {useDeviationThresholds: true, lowThresholds: {cpu: 30}, highThresholds: {cpu: 10}}"
    assert parse_settings(text, DeschedulerSettings).low_node_load.low_thresholds == {"cpu": 30}


def test_it_is_off_by_default() -> None:
    assert "descheduler" not in ControllerConfig().controllers
