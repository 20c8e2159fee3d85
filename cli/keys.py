"""What the keys of `dioptase top` do. Pure: what is chosen and a key in, what is chosen then out."""

from __future__ import annotations

import msgspec

from cli.screens import OVERVIEW, SCREENS

BY_NAME = -1


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is on the screen."""

    screen: str = OVERVIEW.key
    sort: int = 0
    """Index of the column that the screen's table is sorted by; BY_NAME is by name."""
    help: bool = False


def pressed(choice: Choice, key: str) -> Choice | None:
    """What is chosen after a key; None ends the view. A key without a meaning changes nothing."""
    columns = len(SCREENS[choice.screen].columns)
    if key in "qQ":
        return None
    if key in SCREENS:
        return Choice(screen=key)
    if key in "?hH":
        return msgspec.structs.replace(choice, help=not choice.help)
    if key == "n":
        return msgspec.structs.replace(choice, sort=BY_NAME)
    if key in "sS" and columns:
        step = 1 if key == "s" else -1
        now = choice.sort if choice.sort != BY_NAME else -step
        return msgspec.structs.replace(choice, sort=(now + step) % columns)
    return choice
