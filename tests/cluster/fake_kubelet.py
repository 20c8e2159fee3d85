"""A kubelet's list of pods, where none can run: `python -m tests.cluster.fake_kubelet ADDRESS FILE` answers on port 10255 with
the list in FILE."""

from __future__ import annotations

import http.server
import sys
from pathlib import Path

CONFIG = b'{"kubeletconfig": {"topologyManagerPolicy": "none", "topologyManagerScope": "container"}}'


class PodListHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = "/" + self.path.partition("?")[0].strip("/")
        text = {"/pods": Path(sys.argv[2]).read_bytes(), "/configz": CONFIG}.get(path, b'{"node": {}, "pods": []}')
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_words: object) -> None:
        pass


if __name__ == "__main__":
    http.server.ThreadingHTTPServer((sys.argv[1], 10255), PodListHandler).serve_forever()
