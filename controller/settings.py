"""Controllers' settings out of the text of a file."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from controller.config import Config

Complaint = Callable[[msgspec.ValidationError, object, type[Config]], str]


def parse(text: str, check: Callable[[str], None], complaint: Complaint) -> Config:
    """`check` raises ValueError where the text is not one plain YAML document, `complaint` words what does not fit. Raises
    ValueError with the field and the remedy."""
    check(text)
    document = msgspec.yaml.decode(text)
    try:
        return msgspec.convert({} if document is None else document, Config)
    except msgspec.ValidationError as error:
        raise ValueError(complaint(error, document, Config)) from None
