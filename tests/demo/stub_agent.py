"""A stub of `dioptase agent`: answers over HTTP and records how it was ended.

It exits with code 7 after STUB_DIES_AFTER seconds, and on SIGTERM changes the file STUB_BREAKS instead of restoring it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ENTRY = """[{"seq": 1, "wall_time_ns": 1700000000000000000, "round_seq": 3, "trigger": "psi", "policy": "latency",
"outcome": {"decision": {"cgroup": "/dioptase-demo-batch", "cgroup_id": 5, "pod": "demo/batch", "knob": "cpu.idle",
"value": "1", "verdict": {"rule": "priority", "text": "batch gives way"}}, "status": "applied", "before": "0"}}]"""
VIEW = """{"seq": 1, "taken_at_ms": 0, "wall_time_ms": 0, "act": "on", "trigger": "tick", "interval_ms": 1000,
"round_ms": 5, "policy": "latency",
"action": "hold", "rule": "calm", "reason": "", "node_cpus": 2, "busy_cores": 1.5, "steal_cores": 0,
"cpu_pressure_ratio": 0.1, "lent_cores": 1.25, "reclaimed_cores": 1.0, "requirement_cores": 0.5,
"headroom": {"cores": 1, "verdict": {"rule": "r", "text": "t"}},
"pools": {}, "containers": [], "changes": [], "sources": [], "banner": []}"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        decisions = ENTRY if "after=0&" in query else "[]"
        body = {"/healthz": "ok", "/api/v1/view": VIEW, "/api/v1/decisions": decisions}.get(path, f"[{VIEW}]")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    note = Path(os.environ["STUB_NOTE"])
    Path(options["--record"]).mkdir()
    note.write_text(f"{options['--act']}\n{Path(options['--pods']).read_text()}")

    def end(*_: object) -> None:
        if knob := os.environ.get("STUB_BREAKS"):
            Path(knob).write_text("1")
        with note.open("a") as file:
            file.write("SIGTERM\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    host, _, port = options["--listen"].rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("the stub is up", file=sys.stderr, flush=True)
    if seconds := os.environ.get("STUB_DIES_AFTER"):
        time.sleep(float(seconds))
        os._exit(7)
    while True:
        signal.pause()


main()
