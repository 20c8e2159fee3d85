"""`dioptase explain POD --scheduler URL` without a scheduler extender at the URL."""

from __future__ import annotations

from click.testing import CliRunner

from cli.explain.command import explain


def test_an_extender_that_does_not_answer_is_named_with_its_option() -> None:
    done = CliRunner().invoke(explain, ["batch/job", "--scheduler", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "the scheduler extender at http://127.0.0.1:1 does not answer: Connection refused" in done.output
    assert "name a running one with --scheduler" in done.output


def test_a_placement_needs_a_pod() -> None:
    done = CliRunner().invoke(explain, ["--scheduler", "http://127.0.0.1:1"])
    assert done.exit_code == 2
    assert "--scheduler needs a pod, as NAMESPACE/NAME" in done.output
