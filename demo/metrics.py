"""The demo's own /metrics on 127.0.0.1: what a real service would publish of itself, for the agent to read.

The latency is what the client measured: a classic Prometheus histogram in seconds, from the buckets in demo.counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from demo.counters import BOUNDS_US, BUCKETS, Cell, Counters

LATENCY_METRIC = "demo_request_duration_seconds"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
US_PER_S = 1_000_000
NS_PER_S = 1_000_000_000


def exposition(client: Sequence[int], units: int) -> str:
    """The text format of one reading of the client's cells and of the batch job's units."""
    return "\n".join(_lines(client, units)) + "\n"


def _lines(client: Sequence[int], units: int) -> Iterator[str]:
    yield f"# HELP {LATENCY_METRIC} Time from when a request was due to the arrival of its reply."
    yield f"# TYPE {LATENCY_METRIC} histogram"
    below = 0
    for bound_us, count in zip((*BOUNDS_US, None), client[:BUCKETS], strict=True):
        below += count
        le = "+Inf" if bound_us is None else f"{bound_us / US_PER_S:.7g}"
        yield f'{LATENCY_METRIC}_bucket{{le="{le}"}} {below}'
    yield f"{LATENCY_METRIC}_sum {client[Cell.SUM_NS] / NS_PER_S:.9f}"
    yield f"{LATENCY_METRIC}_count {below}"
    yield "# HELP demo_requests_lost_total Requests that got no reply within the timeout."
    yield "# TYPE demo_requests_lost_total counter"
    yield f"demo_requests_lost_total {client[Cell.LOST]}"
    yield "# HELP demo_batch_units_total Units of work that the batch job has done."
    yield "# TYPE demo_batch_units_total counter"
    yield f"demo_batch_units_total {units}"


class MetricsServer:
    """Serves the counters from threads of this process, until closed."""

    def __init__(self, client: Counters, batch: Counters) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                body = exposition(client.values(), sum(batch.values())).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                """One line a second about being scraped helps nobody."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
