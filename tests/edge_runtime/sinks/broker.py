"""A real broker: mosquitto."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from tests.edge_runtime.sinks.messages import until

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Broker:
    """A broker on the loopback, which can end and start again."""

    def __init__(self, folder: Path, *lines: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._config = folder / "broker.conf"
        anonymous = [] if any("allow_anonymous" in line for line in lines) else ["allow_anonymous true"]
        self._config.write_text("\n".join([f"listener {self.port} 127.0.0.1", "user root", *anonymous, *lines]) + "\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert MOSQUITTO is not None
        self.process = subprocess.Popen([MOSQUITTO, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        until(self._listens)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
