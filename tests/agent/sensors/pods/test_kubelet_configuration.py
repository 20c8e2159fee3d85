"""The poller of the kubelet's `/configz`: valid, malformed and missing answers."""

from __future__ import annotations

from contextlib import suppress

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.config.kubelet import KubeletConfig
from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient
from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller, KubeletConfiguration, parse_configz
from api.interfaces import Unavailable
from tests.agent.sensors.pods.test_kubelet_client import serving


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "Input data was truncated"),
        (b"{}", "kubeletconfig"),
        (b'{"kubeletconfig":{}}', "cpuManagerPolicy"),
        (
            b'{"kubeletconfig":{"cpuManagerPolicy":"none","topologyManagerPolicy":5}}',
            "kubeletconfig.topologyManagerPolicy",
        ),
    ],
)
def test_a_malformed_answer_is_unavailable(answer: bytes, reason: str) -> None:
    with pytest.raises(Unavailable) as raised:
        parse_configz(answer)
    assert raised.value.reason.startswith("the kubelet's /configz has an unexpected format: ")
    assert reason in raised.value.reason


@given(st.binary(max_size=200))
def test_no_answer_raises_another_exception(answer: bytes) -> None:
    with suppress(Unavailable):
        parse_configz(answer)


async def test_the_last_answer_stays_while_the_kubelet_is_unreachable() -> None:
    answers = [(200, {"cpuManagerPolicy": "static", "memoryManagerPolicy": "None"}), (403, {}), (200, {})]

    async def kubelet(_request: web.Request) -> web.Response:
        status, answer = answers.pop(0)
        return web.json_response({"kubeletconfig": answer}, status=status)

    async with serving(kubelet) as url, KubeletClient(KubeletConfig(url=url), CONFIGZ_PATH) as client:
        poller = KubeletConfigPoller(client)
        for problem in ("", "answered 403", "/configz has an unexpected format"):
            await poller.poll()
            assert poller.configuration == KubeletConfiguration(
                cpu_manager_policy="static", memory_manager_policy="None"
            )
            assert problem in ("" if poller.problem is None else poller.problem.reason)
