"""A service of S3 in this process: moto's, behind a port that processes reach; it counts, waits, and may fail."""

import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

BUCKET = "bucket"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class S3Service:
    """It answers one request after the other, so that what it decides is atomic; waiting before goes side by side."""

    def __init__(self) -> None:
        # Here: tests that are collected and not run need not wait for it.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._deciding, self._counting = threading.Lock(), threading.Lock()
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()
        self.seconds = 0.0
        """How long each request waits."""
        self.num_failures = 0
        """So many requests are answered by SlowDown."""
        self.requests: list[str] = []
        """The methods of all, in their order."""
        self.in_flight = self.most_in_flight = 0
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")).read()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of who uses it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "name",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def forget(self) -> None:
        """Count from here on."""
        self.requests, self.most_in_flight = [], 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._counting:
            self.requests.append(environ["REQUEST_METHOD"])
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            fails = self.num_failures > 0
            self.num_failures -= fails
        try:
            time.sleep(self.seconds)
            if fails:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("503 Slow Down", [("Content-Length", str(len(SLOW_DOWN)))])
                return [SLOW_DOWN]
            with self._deciding:
                return list(self._app(environ, start_response))
        finally:
            with self._counting:
                self.in_flight -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def enter(variables: dict[str, str]) -> None:
    """Use the service from this process on."""
    os.environ.update(variables)
