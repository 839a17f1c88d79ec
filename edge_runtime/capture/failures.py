"""Why a source gives no frames: in one line without secrets, and whether that can pass by itself."""

from __future__ import annotations

import errno

from gemel.models.errors import InputError
from gemel.models.files.video import reason_of

REFUSALS = {
    400: "the server does not understand the address (400)",
    401: "user or password is missing or wrong (401)",
    403: "access is forbidden (403)",
    404: "there is no such stream (404)",
    410: "the stream is gone for good (410)",
}
"""HTTP and RTSP statuses that stay as long as neither address nor server is changed."""
REFUSAL_ERRORS = {
    "HTTPBadRequestError": 400, "HTTPUnauthorizedError": 401, "HTTPForbiddenError": 403, "HTTPNotFoundError": 404,
}  # fmt: skip
"""PyAV's errors for these statuses."""
OTHER_ERRORS = {
    "HTTPTooManyRequestsError": "the server is asked too often (429)",
    "HTTPOtherClientError": "the server refuses it by another status of 4xx: it may have too many viewers (453)",
    "HTTPServerError": "the server fails itself, by a status of 5xx",
    "InvalidDataError": "it sends no video, or hangs up",
}
"""PyAV's errors whose words say little; these pass, or may."""
NO_VIDEO_ERRORS = {"ArgumentError", "InvalidDataError"}
"""PyAV's errors for a format that is not on the allow-list, and for none at all."""


class SourceLost(Exception):
    """A source cannot be opened or gives no more frames; the text holds no address and no password.

    `permanent`: that stays until someone changes the address, its password or the camera.
    """

    def __init__(self, problem: str, permanent: bool = False) -> None:
        super().__init__(problem)
        self.permanent = permanent


def refusal(status: int) -> SourceLost:
    """The failure behind a status of HTTP or RTSP that is no success."""
    return SourceLost(REFUSALS.get(status, f"the server answers {status}"), status in REFUSALS)


def to_source_lost(error: BaseException) -> SourceLost:
    """Any failure of a source: libraries write addresses with their passwords into their messages."""
    if isinstance(error, SourceLost):
        return error
    kind = type(error).__name__
    if kind in REFUSAL_ERRORS:
        return refusal(REFUSAL_ERRORS[kind])
    if kind in OTHER_ERRORS:
        return SourceLost(OTHER_ERRORS[kind])
    if refuses_transport(error):
        return SourceLost("it gives RTSP neither over TCP nor over UDP (461 Unsupported Transport)", permanent=True)
    if kind == "ProtocolNotFoundError":
        return SourceLost("this FFmpeg does not know the scheme of the address", permanent=True)
    return SourceLost(reason_of(error))


def open_failure(error: InputError, is_address: bool) -> SourceLost:
    """The failure behind a video that cannot be opened; what a server sends in place of one does not pass."""
    cause = error.__context__
    if cause is None:
        return SourceLost(f"it {error.problem}", permanent=is_address)
    lost = to_source_lost(cause)
    has_words = lost.permanent or (is_address and type(cause).__name__ in OTHER_ERRORS)
    return lost if has_words else SourceLost(f"it {error.problem}")


def is_no_video(error: BaseException | None) -> bool:
    """Whether FFmpeg found something that is none of the formats of video that it may open."""
    return type(error).__name__ in NO_VIDEO_ERRORS


def refuses_transport(error: BaseException | None) -> bool:
    """Whether a camera refuses the way in which RTSP's frames are to come (461)."""
    return isinstance(error, OSError) and error.errno == errno.EPROTONOSUPPORT


def may_be_redirect(error: BaseException | None) -> bool:
    """Whether FFmpeg may have met a redirect, of which it follows none: to it that is an I/O error."""
    return isinstance(error, OSError) and error.errno == errno.EIO
