"""The certificate of the HTTP service: loaded anew when its files change, and named days before it runs out."""

from __future__ import annotations

import datetime
import logging
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from gemel.edge_runtime.http.auth import TlsFiles
from gemel.models.errors import InputError
from gemel.models.files.io import read_bounded

MAX_PEM_BYTES = 1 << 20
WARNING_DAYS = 14.0
POLL_INTERVAL_S, REMINDER_INTERVAL_S = 10.0, 86400.0
HINT = "give the certificate with its chain and its own key, both PEM, the key without a passphrase"

log = logging.getLogger("gemel.run")


class Certificate:
    """The TLS context of these files; raises InputError, naming the config's key, where they do not fit each other.

    `clock` is in Unix seconds.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        self._files, self._clock = files, clock
        self.problem: str | None = None
        """Why changed files are not used."""
        self._stamps = self._read_stamps()
        self.context, self.expires_at = _load(files)
        self._polled_at = self._reminded_at = -REMINDER_INTERVAL_S
        self._warn()

    @property
    def days_left(self) -> float:
        """Days until it runs out; negative afterwards."""
        return (self.expires_at - self._clock()) / 86400

    @property
    def warning(self) -> str | None:
        """One line where it runs out soon, or where new files cannot be used."""
        if self.problem is not None:
            return f"TLS: {self.problem}; the certificate of before is used"
        if self.days_left <= 0:
            return f"TLS: the certificate {self._files.cert.name} has run out"
        if self.days_left <= WARNING_DAYS:
            return f"TLS: the certificate {self._files.cert.name} runs out in {self.days_left:.1f} days"
        return None

    def poll(self) -> None:
        """Load the files again where they have changed, and log what is wrong with them."""
        now = self._clock()
        if now < self._polled_at + POLL_INTERVAL_S:
            return
        self._polled_at = now
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self.context, self.expires_at = _load(self._files)
                self.problem, self._reminded_at = None, -REMINDER_INTERVAL_S
                log.info("TLS: the certificate was loaded again; it is valid for %.0f days", self.days_left)
            except InputError as error:
                self.problem = str(error)
                log.error("TLS: %s; the certificate of before is used", error)
        self._warn()

    def _warn(self) -> None:
        if (
            self.warning is not None
            and self.problem is None
            and self._clock() >= self._reminded_at + REMINDER_INTERVAL_S
        ):
            self._reminded_at = self._clock()
            log.warning("%s", self.warning)

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(self._files.cert), _stamp(self._files.key)]


def check_certificate(files: TlsFiles) -> None:
    """Raise InputError where it has run out, so that no client connects; a box serves on, as its clock may be wrong."""
    days_left = (_load(files)[1] - time.time()) / 86400
    if days_left <= 0:
        raise InputError(files.cert, f"has run out {-days_left:.0f} days ago", "renew it", "http.tls.cert")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load(files: TlsFiles) -> tuple[ssl.SSLContext, float]:
    """The context, and the Unix time at which the certificate runs out."""
    from cryptography import x509

    for key, path in (("http.tls.cert", files.cert), ("http.tls.key", files.key)):
        try:
            data = read_bounded(path, MAX_PEM_BYTES, HINT)
        except InputError as error:
            raise InputError(path, error.problem, error.hint, key) from error
        if b"-----BEGIN" not in data:
            raise InputError(path, "is no PEM file", HINT, key)
    try:
        certificate = x509.load_pem_x509_certificate(read_bounded(files.cert, MAX_PEM_BYTES, HINT))
    except ValueError as error:
        raise InputError(files.cert, "holds no certificate", HINT, "http.tls.cert") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_passphrase() -> str:
        raise InputError(files.key, "needs a passphrase", HINT, "http.tls.key")

    try:
        context.load_cert_chain(files.cert, files.key, refuse_passphrase)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or "no PEM key"
        problem = "does not belong to the certificate" if "MISMATCH" in reason else f"cannot be used ({reason})"
        raise InputError(files.key, problem, HINT, "http.tls.key") from error
    until = getattr(certificate, "not_valid_after_utc", None)
    if until is None:
        until = certificate.not_valid_after.replace(tzinfo=datetime.timezone.utc)
    return context, until.timestamp()
