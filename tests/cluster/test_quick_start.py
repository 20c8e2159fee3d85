"""Runs the commands of docs/quick-start.md on a real node and compares their outputs with the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.cluster import images
from tests.cluster.cluster import CONSENT, Cluster
from tests.cluster.doc_commands import PastingShell, answers, blocks, follow, parts, steps
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.image_and_chart import SHARED_MACHINE
from tests.cluster.programs import CODE, Agent, Controller
from tests.cluster.service_accounts import LENDING, Account

PAGE = (CODE / "docs/quick-start.md").read_text()
ONE_SCRIPT = "## The whole path in one script"
"""Heading of the last section, which installs the chart and has a test of its own: test_namespace_colocation.py."""
BUSYBOX = "docker.io/library/busybox:1.36"


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("1500\n", "1500\n", True),
        ("1500", "1500\n", True),
        ("15000\n", "1500\n", False),
        ("", "1500\n", False),
        ("cpu 2\n", "cpu …\n", True),
        ("cpu 2\nmemory 3\n", "cpu …\n", False),
        ("a\nb\nc\n", "a\n…\n", True),
        ("a\n", "a\n…\n", True),
        ("b\n", "a\n…\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_an_answer_is_as_written_or_not(text: str, expected: str, same: bool) -> None:
    assert answers(text, expected) is same


def test_parts_of_a_script_share_the_variables_of_one_shell(tmp_path: Path) -> None:
    first, second = parts(
        "# 1. Begin.\nx=3\n\n# 2. Go on.\n# more\ntouch y\necho $((x + 1))\nprintf 'no newline'; echo\n"
    )
    shell = PastingShell({"PATH": "/usr/bin:/bin"}, tmp_path)
    assert (shell.run(first, 20), shell.run(second, 20)) == ("", "4\nno newline\n")
    assert (tmp_path / "y").exists()
    with pytest.raises(
        AssertionError, match=r"the script ended with 2 in 'ls none\\necho not reached'; its output: .*No such file"
    ):
        shell.run("ls none\necho not reached", 20)
    shell.close()


def test_a_part_of_a_script_that_does_not_end_is_killed(tmp_path: Path) -> None:
    shell = PastingShell({"PATH": "/usr/bin:/bin"}, tmp_path)
    with pytest.raises(AssertionError, match="the script ended with -9"):
        shell.run("while :; do read -t 0.05 < /dev/zero || :; done", 0.2)
    shell.close()


@pytest.fixture
def world(
    own_cluster: Cluster, cluster: Cluster | ExternalCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The page's prerequisites: a node with an image, the two programs, and the shell's variables."""
    node = own_cluster.nodes[0]
    archive = tmp_path / "busybox.tar"
    images.write(archive, {BUSYBOX: ()})
    node.load(archive)
    settings = msgspec.yaml.decode(next(text for _, kind, text in blocks(PAGE) if kind == "yaml"))
    settings["advisor"]["headroom"] |= SHARED_MACHINE["headroom"]
    folder = tmp_path_factory.mktemp("quick")
    own_cluster.kubectl("apply", "--server-side", "-f", CODE / "deploy/crds")
    controller = Controller(own_cluster, Account(own_cluster, "dioptase-controller", CONSENT, folder), folder, 5)
    account = Account(own_cluster, "dioptase-agent", CONSENT, folder, (LENDING,))
    agent = Agent(own_cluster, node, account, folder, settings, ("--profile", "katalyst"))
    for item in (controller, agent):
        item.begin()
    path = f"{Path(sys.executable).parent}:{own_cluster.programs['kubectl'].parent}:/usr/bin:/bin"
    yield {
        "PATH": path, "KUBECONFIG": str(own_cluster.kubeconfig), "NODE": node.name, "AGENT": agent.url,
        "HOME": str(tmp_path), "PYTHONPATH": str(CODE),
    }  # fmt: skip
    for item in (agent, controller):
        item.end()


@pytest.mark.cluster
@pytest.mark.long
def test_the_commands_of_the_page_have_the_outputs_of_the_page(world: dict[str, str]) -> None:
    listed = list(steps(PAGE[: PAGE.index(ONE_SCRIPT)]))
    assert len(listed) > 10
    for step in listed:
        follow(step, world, CODE, 60)
