"""Errors of every section of the settings file: the message names the field and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.config import AgentConfig
from agent.config.loader import ConfigError
from tests.builders.settings import parse_config

LEVELS = "choose from shared_cores, dedicated_cores, reclaimed_cores, system_cores"
WRONG = {
    # of another type
    "memory: {reservedForAllocateBytes: 5GiB}": "memory.reservedForAllocateBytes: Expected `int | null`, got `str`",
    "knobs: {io: 5}": "knobs.io: Expected `object`, got `int`",
    "knobs:": "knobs: Expected `object`, got `null`",
    "knobs: {burst: {policy: off}}": "knobs.burst.policy: Expected `str`, got `bool`, choose from off, katalyst, koordinator; "
    "put it in quotes",
    "knobs: {io: {max: {shared_cores: 8:16}}}": "knobs.io.max.shared_cores: Expected `str`, got `int`; put it in quotes",
    "report: {periodS: soon}": "report.periodS: Expected `float`, got `str`",
    "power: {enable: 1}": "power.enable: Expected `bool`, got `int`",
    "node: {annotations: {power-budget: 80}}": "node.annotations.power-budget: Expected `str`, got `int`; put it in quotes",
    "placing: {reservedCpus: 2.5}": "placing.reservedCpus: Expected `int`, got `float`",
    "eviction: {plugins: oomd-pressure}": "eviction.plugins: Expected `array`, got `str`",
    "exporters: [1]": "exporters: Expected `object`, got `array`",
    # out of bounds
    "memory: {offloading: {cgroups: {/a: {intervalS: 0}}}}": "memory.offloading.cgroups./a.intervalS: Expected `float` > 0.0",
    "knobs: {io: {weights: {shared_cores: 5, reclaimed_cores: 0}}}": "knobs.io.weights.reclaimed_cores: Expected `int` >= 1",
    "forecast: {missRatio: 0.5}": "forecast.missRatio: Expected `float` <= 0.2",
    "inference: {slots: [{below: 1, offset: 0}, {below: 2, offset: 3}]}": "inference.slots[1].offset: Expected `float` <= 1.0",
    "overcommit: {targetCpu: 60}": "overcommit.targetCpu: Expected `float` <= 1.0",
    "power: {voluntaryPercent: -1}": "power.voluntaryPercent: Expected `int` >= 0",
    "intervalS: .nan": "intervalS: Expected `float` >= 0.2",
    # unknown
    "memory: {offloadin: {}}": "memory: Object contains unknown field `offloadin`, did you mean `offloading`?",
    "knobs: {memoryQos: {shared_cores: {minPercnt: 3}}}": "knobs.memoryQos.shared_cores: Object contains unknown field "
    "`minPercnt`, did you mean `minPercent`?",
    "forecast: {horizon: 3}": "forecast: Object contains unknown field `horizon`, choose from method, "
    "missRatio, minHistoryS, staleS",
    "evict: {}": "top level: Object contains unknown field `evict`, did you mean `eviction`?",
    "knobs: {io: {weights: {shared: 5}}}": f"knobs.io.weights.shared: a key: Invalid enum value 'shared', {LEVELS}",
    "knobs: {io: {wbtUs: {TAPE: 1}}}": "knobs.io.wbtUs.TAPE: a key: Invalid enum value 'TAPE', choose from HDD, SSD, NVME",
    "eviction: {plugins: ['*', foo]}": "eviction.plugins[1]: Invalid enum value 'foo', choose from reclaimed-resource-",
    "advisor: {provision: {sharePolicies: [ramma]}}": "advisor.provision.sharePolicies[0]: Invalid enum value 'ramma', choose "
    "from none, canonical, rama, dynamic-quota",
    "advisor: {provision: {restrict: {rama: x}}}": "advisor.provision.restrict.rama: Invalid enum value 'x', choose from none",
    "advisor: {provision: {gains: {cpi: {up: 1}}}}": "advisor.provision.gains.cpi: Object missing required field `down`",
    "shadow: {policy: x}": "shadow.policy: Invalid enum value 'x', choose from latency, canonical, none",
    "memory: {offloading: {levels: {shared_cores: {policy: x}}}}": "memory.offloading.levels.shared_cores.policy: Invalid enum "
    "value 'x', choose from psi, refault, integrated, senpai",
    "inference: {specialTimes: [{start: '7:00', end: '08:00', offset: 0}]}": "inference.specialTimes[0].start: Expected `str` "
    "matching regex",
    # in one place only: advisor.enableReclaim sizes the pools, and sizes are always given
    "placing: {enableReclaim: false}": "placing: Object contains unknown field `enableReclaim`",
    # contradictory
    "{intervalS: 9, watchIntervalS: 9, advisor: {latency: {staleS: 9}}, shadow: {}}": "shadow.latency.staleS: 5 is less than "
    "intervalS, 9: waits would always be too old; raise it",
    "knobs: {suppress: {policy: cfsQuota}}": "knobs.suppress.policy: cfsQuota would never take effect, "
    "because advisor.policy latency decides that of reclaimed pods; set advisor.policy to none",
    "{advisor: {policy: canonical}, knobs: {suppress: {policy: cpuset}}}": "knobs.suppress.policy: cpuset would "
    "never take effect, because advisor.policy canonical decides that of reclaimed pods; set advisor.policy to none",
    "placing: {reservedCpuList: 0-}": "placing: reservedCpuList: CPU list '0-': '0-' is neither a number nor a range like 0-3",
    "placing: {reservedCpuList: 0-3, interruptCpuList: 3-4}": "placing: reservedCpuList and interruptCpuList both have CPU 3; "
    "remove it from one of them",
    "placing: {reservedCpuList: 0-3, reservedCpus: 2}": "placing: reservedCpus is 2 and reservedCpuList has 4 CPUs; set one of",
    "advisor: {headroom: {util: {maximum: 0.5}}}": "advisor.headroom.util: maximum 0.5 is below target 0.6",
    "report: {windowS: 10}": "report: windowS 10 is shorter than periodS 30: no sample would be left; raise it",
    "report: {maxStepCores: 0.1}": "report: maxStepCores 0.1 is below minStepCores 0.3: no change would ever be reported",
    "report: {expiredS: 60}": "report: expiredS 60 must be longer than freshS 180",
    "inference: {strategy: borwein_v2}": "inference: strategy borwein_v2 needs slots; add them or choose none",
    "inference: {offsetMin: 0.5}": "inference: offsetMin 0.5 is above offsetMax 0.25; lower it",
    "inference: {targetMin: 0.95}": "inference: targetMin 0.95 is above targetMax 0.9; lower it",
    "inference: {slots: [{below: 2, offset: 0}, {below: 1, offset: 0}]}": "inference: slots: below 1 comes after below 2; put",
    "memory: {balancer: {enable: false}}": "memory: Object contains unknown field `balancer`, choose from policy, ",
    "eviction: {plugins: [numa-memory-balancer]}": "eviction.plugins[0]: Invalid enum value 'numa-memory-balancer', choose",
    "memory: {offloading: {senpaiMaxBytes: 5}}": "memory.offloading: senpaiMinBytes 104857600 is above senpaiMaxBytes 5; ",
    "memory: {utilBased: {cpuMemoryRatioLow: 1}}": "memory.utilBased: cpuMemoryRatioLow 1 is above cpuMemoryRatioHigh 0.285714",
    "eviction: {koordinatorMemory: {lower: 0.8}}": "eviction.koordinatorMemory: lower 0.8 is above threshold 0.7; lower it, or",
    "eviction: {koordinatorCpu: {satisfactionLower: 0.9}}": "eviction.koordinatorCpu: satisfactionLower 0.9 is above ",
    "eviction: {numaCpu: {evictionFrequency: true}}": "eviction.numaCpu: Object contains unknown field `evictionFrequency`",
    "eviction: {plugins: ['*'], dryRun: [oomd-pressure]}": "eviction: dryRun: oomd-pressure does not run; name it in plugins "
    "too, or remove it here",
    "knobs: {resctrl: {levels: {shared_cores: {catStartPercent: 60, catEndPercent: 40}}}}": "knobs.resctrl.levels.shared_cores"
    ": catStartPercent 60 is not below catEndPercent 40: no cache way would be left; lower it",
    "knobs: {io: {max: {reclaimed_cores: sda wbps=1}}}": "knobs.io.max.reclaimed_cores: 'sda' is not the number of a device "
    "such as 8:16",
    "knobs: {io: {max: {reclaimed_cores: '8:0 wbps=1M'}}}": "knobs.io.max.reclaimed_cores: '1M' is not a whole number of",
    "knobs: {io: {costQos: {sda: enable}}}": "knobs.io: costQos: sda: 'enable' is none of enable, ctrl, rpct",
    "knobs: {io: {costModel: {sda: ''}}}": "knobs.io: costModel: sda: '' is none of ctrl, model, rbps",
    "kubelet: {url: '10.0.0.1:10250'}": "kubelet.url: Expected `str` matching regex '^https?://",
    "kubelet: {cgroupRoot: kubelab}": "kubelet.cgroupRoot: Expected `str` matching regex '^/",
    "kubelet: {token: abc}": "kubelet: Object contains unknown field `token`, did you mean `tokenFile`?",
    "kubelet: {keyFile: /k}": "kubelet: certificateFile is missing; set both certificateFile and keyFile, or neither",
    "kubelet: {intervalS: 60}": "kubelet: staleS 30 is not longer than 5 times intervalS 60: the list would",
    "sockets: {serve: [orm]}": "sockets.serve[0]: Invalid enum value 'orm'",
    "sockets: {advisorDir: run}": "sockets.advisorDir: Expected `str` matching regex '^/'",
    "sockets: {serve: [advisor], take: [cpu]}": "sockets: take has cpu, and serve has advisor, which uses the same sockets; ",
    "{sockets: {take: [cpu]}, advisor: {policy: none}}": "sockets.take: cpu would never take effect, because advisor.policy is",
    "memory: {reclaimRoot: kubepods}": "memory: reclaimRoot: 'kubepods' ",
    "memory: {reclaimRoot: /}": "memory: reclaimRoot: '/' ",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_field_and_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text.encode(), "f.yaml")
    assert str(caught.value).startswith(f"f.yaml: {WRONG[text]}")


def test_every_section_is_covered() -> None:
    covered = {text.lstrip("{").partition(":")[0] for text in WRONG}
    assert {
        name
        for name in AgentConfig.__struct_encode_fields__
        if name not in ("watchIntervalS", "maxCgroups", "qos", "probes")
    } <= covered


def test_an_error_names_the_page_with_the_bounds() -> None:
    with pytest.raises(ConfigError, match=r"; docs/settings\.md lists every setting and its bounds"):
        parse_config(b"exporters: {maxCgroups: 0}", "f.yaml")
    assert (Path(__file__).parents[2] / "docs/settings.md").exists()


def test_long_keys_are_truncated_in_errors() -> None:
    for text in (f"knobs: {{io: {{weights: {{{'x' * 900}: 1}}}}}}", f"{'x' * 900}: 1"):
        with pytest.raises(ConfigError) as caught:
            parse_config(text.encode(), "f.yaml")
        assert len(str(caught.value)) < 600
