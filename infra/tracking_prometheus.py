"""The last step's metrics as Prometheus text on a port, for those who scrape.

`perf/mfu/llm` becomes `omni_perf_mfu{part="llm"}`: the area and the quantity are the name, what follows is
the label `part`, and characters that a name may not have become underscores. The run's name is a label, too.
"""

import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from infra.tracker import Tracker, record

SILENT_S = 10.0  # for a request to arrive
CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def start_prometheus(host: str, port: int, run: str) -> "PrometheusTracker":
    """Serve on `host` and `port`, 0 for any that is free, until the tracker is finished.

    Raises ValueError with the remedy if the port is in use, or the host is not this machine's.
    """
    latest = _Latest(run)
    try:
        server = ThreadingHTTPServer((host, port), lambda *of: _Handler(latest, *of))
    except OSError as error:
        raise ValueError(
            f"tracking.prometheus_port={port} of tracking.prometheus_host={host} cannot be served ({error}): "
            "choose another port, 0 for any that is free, or null for none"
        ) from error
    server.daemon_threads = True
    return PrometheusTracker(server, latest)


class _Latest:
    """The text of the last step: replaced as a whole, so that a reader never sees half of it."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.text = ""


class PrometheusTracker(Tracker):
    """Serves the last step's metrics."""

    def __init__(self, server: ThreadingHTTPServer, latest: _Latest) -> None:
        self._server = server
        self._latest = latest
        self._thread = Thread(target=server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()
        host, port = server.server_address[:2]
        self.where = f"Prometheus at http://{host!s}:{port}/metrics"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve this step from now on."""
        self._latest.text = exposition(record(step, metrics), self._latest.run)

    def finish(self, exit_code: int) -> None:
        """Close the port, and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENT_S

    def __init__(self, latest: _Latest, *of: object) -> None:
        self.latest = latest
        super().__init__(*of)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with the last step."""
        found = self.path in ("/", "/metrics")
        body = self.latest.text.encode() if found else b"see /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests: the screen is the run's."""


def exposition(metrics: Mapping[str, float], run: str) -> str:
    """Return metrics in Prometheus' text format, one family after the other."""
    families: dict[str, list[str]] = {}
    for key, value in metrics.items():
        area, _, rest = key.partition("/")
        quantity, _, part = rest.partition("/")
        labels = {"run": run} | ({"part": part} if part else {})
        written = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        name = re.sub(r"[^a-zA-Z0-9_]", "_", f"omni_{area}_{quantity}")
        families.setdefault(name, []).append(f"{name}{{{written}}} {_number(value)}\n")
    return "".join(f"# TYPE {name} gauge\n{''.join(lines)}" for name, lines in families.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    """Prometheus reads Go's numbers: NaN, +Inf and -Inf beside those that Python writes."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(value), text)
