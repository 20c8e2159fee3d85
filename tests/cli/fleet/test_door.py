"""What goes wrong is told in words that can do nothing to a terminal: agents' own are among them."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from cli.kubectl import kubectl


def test_a_problem_moves_no_cursor(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('{"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}')
    done = CliRunner().invoke(kubectl, ["top", "--kubeconfig", str(config), "--context", "\x1b[2Jx"])
    assert done.exit_code == 1
    assert "contexts[\\x1b[2Jx]: is not there\n  remedy: " in done.output
    assert "\x1b" not in done.output
