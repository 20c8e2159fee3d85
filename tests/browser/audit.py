"""Accessibility checks of our own, run inside the page.

Each finding is one line that names the element. Nothing here knows the page: it is WCAG 2.2 A and AA as far as a program
can tell: names, headers of tables, headings, unique ids, order of focus, contrast, size of what is clicked.
"""

from __future__ import annotations

from pathlib import Path

AUDIT = Path(__file__).with_name("audit.js").read_text()
