"""GStreamer's RTSP server with a test picture, run by the system's python3.

Prints its port. `/h264`, `/bframes` and `/jpeg` show colour bars; the user is `user`, the password `secret` (digest).
"""

from __future__ import annotations

import sys

import gi  # pyright: ignore[reportMissingImports]

gi.require_version("Gst", "1.0")
gi.require_version("GstRtsp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402  # pyright: ignore[reportMissingImports]

BARS = "videotestsrc is-live=true pattern=smpte75 ! video/x-raw,format=I420,width=352,height=288,framerate=25/1"
H264 = "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=10"
B_FRAMES = "x264enc speed-preset=veryfast bframes=2 b-adapt=false key-int-max=50 threads=1 ! video/x-h264,profile=main"
PATHS = {
    "/h264": f"( {BARS} ! {H264} ! rtph264pay name=pay0 pt=96 )",
    "/bframes": f"( {BARS} ! {B_FRAMES} ! rtph264pay name=pay0 pt=96 )",
    "/jpeg": f"( {BARS} ! jpegenc ! rtpjpegpay name=pay0 pt=26 )",
}


def main(port: str) -> None:
    """Serve at this port, 0 for a free one, until killed."""
    Gst.init(None)
    if Gst.ElementFactory.find("x264enc") is None:
        sys.exit("GStreamer has no x264enc")
    server = GstRtspServer.RTSPServer.new()
    server.set_address("127.0.0.1")
    server.set_service(port)
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth = GstRtspServer.RTSPAuth.new()
    auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
    auth.add_digest("user", "secret", token)
    server.set_auth(auth)
    for path, pipeline in PATHS.items():
        factory = GstRtspServer.RTSPMediaFactory.new()
        factory.set_launch(pipeline)
        factory.set_shared(True)
        factory.add_role_from_structure(_viewer_role())
        server.get_mount_points().add_factory(path, factory)
    server.attach(None)
    print(server.get_bound_port(), flush=True)
    GLib.MainLoop().run()


def _viewer_role() -> Gst.Structure:
    return Gst.Structure.new_from_string(
        "viewer, media.factory.access=(boolean)true, media.factory.construct=(boolean)true"
    )


if __name__ == "__main__":
    main(sys.argv[1])
