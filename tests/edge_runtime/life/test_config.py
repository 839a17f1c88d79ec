"""The box's configuration: values with absolute paths, and every fault in one line."""

from __future__ import annotations

import urllib.parse

import pytest

from gemel.edge_runtime.life.config import SpoolConfig, load_config
from gemel.edge_runtime.sinks.jsonl import JsonLinesConfig
from gemel.models.errors import InputError
from tests.edge_runtime.tiny import write_config


def test_config_has_absolute_paths(tmp_path):
    cameras = {
        "left": {"source": "left.mp4", "loop": True},
        "net": {"source": "rtsp://box/1", "fps": 5},
        "usb": {"source": 0},
    }
    sinks = [{"kind": "jsonl"}, {"kind": "jsonl", "path": "r"}]
    config = load_config(write_config(tmp_path, budget="1MiB", cameras=cameras, spool="spool", sinks=sinks))
    assert config.bundle == tmp_path / "tiny.safetensors"
    assert config.spool == SpoolConfig(tmp_path / "spool", 256 * 2**20, 60.0)
    assert (config.budget_bytes, config.engine, config.device) == (2**20, "torch", "cpu")
    assert [(c.source, c.fps, c.loop) for c in config.cameras.values()] == [
        (str(tmp_path / "left.mp4"), None, True),
        ("rtsp://box/1", 5, False),
        ("0", None, False),
    ]
    assert config.sinks == (JsonLinesConfig(), JsonLinesConfig(path=tmp_path / "r")) and not config.overflow
    assert load_config(write_config(tmp_path, overflow=True)).overflow
    given = load_config(write_config(tmp_path, spool={"path": "new", "max_bytes": "1MiB", "every_s": 5})).spool
    assert given == SpoolConfig(tmp_path / "new", 2**20, 5.0) and given is not None and not given.path.exists()


def test_config_fills_in_environment(tmp_path):
    cameras = {"net": {"source": "rtsp://u:${PASS_1}@box/${PATH_1}", "timeout_s": 2.5, "decode": "${DECODER}"}}
    path = write_config(tmp_path, budget="${SIZE}", cameras=cameras)
    given = {"PASS_1": "p$w}", "PATH_1": "1", "SIZE": "1MiB", "DECODER": "cpu"}
    config = load_config(path, given)
    camera = config.cameras["net"]
    assert (camera.source, camera.timeout_s, camera.decode) == ("rtsp://u:p%24w%7D@box/1", 2.5, "cpu")
    assert config.budget_bytes == 2**20


@pytest.mark.parametrize(
    "secret", ["plain", "a@b", "a#b", "a/b", "a?b", "a:b", "50%25", "a b+c", "pässwörd", "", "&[]"]
)
def test_config_percent_encodes_user_and_password_of_addresses(tmp_path, secret):
    cameras = {
        "both": {"source": "rtsp://${X}:${X}@[::1]:554/live?user=${X}"},
        "mixed": {"source": "http://me@here:1${X}2${X}@box/${X}"},
        "one": {"source": "rtsp://${LOGIN}@box/1"},
        "none": {"source": "rtsp://box/${X}@1"},
        "path": {"source": "clips/u:${X}@v.mp4"},
    }
    sinks = [{"kind": "webhook", "url": "https://me:${X}@hook.example/results"}]
    config = load_config(write_config(tmp_path, cameras=cameras, sinks=sinks), {"X": secret, "LOGIN": f"user:{secret}"})
    sources = {name: camera.source for name, camera in config.cameras.items()}
    for name, user in (("both", secret), ("mixed", "me@here"), ("one", "user")):
        login = urllib.parse.urlsplit(sources[name]).netloc.rpartition("@")[0].partition(":")
        expected = f"1{secret}2{secret}" if name == "mixed" else secret
        assert [urllib.parse.unquote(part) for part in login[::2]] == [user, expected]
    assert sources["both"].endswith(f"@[::1]:554/live?user={secret}") and sources["mixed"].endswith(f"@box/{secret}")
    assert (sources["none"], sources["path"]) == (f"rtsp://box/{secret}@1", str(tmp_path / f"clips/u:{secret}@v.mp4"))
    url = urllib.parse.urlsplit(config.sinks[0].url)  # type: ignore[attr-defined]
    assert (url.hostname, urllib.parse.unquote(url.password or "")) == ("hook.example", secret)


@pytest.mark.parametrize("secret", ["hunter2 'x", "s3cret" * 30])
@pytest.mark.parametrize(
    "keys",
    [
        {"budget": "${SECRET}"},
        {"device": "${SECRET}"},
        {"cameras": {"left": {"source": "x", "fps": "${SECRET}"}}},
        {"cameras": {"left": {"source": "x", "decode": "${SECRET}"}}},
        {"cameras": {"left": {"source": "${SECRET}://box"}}},
        {"cameras": {"left": {"source": "ftp://u:${SECRET}@box"}}},
        {"sinks": [{"kind": "webhook", "url": "ftp://u:${SECRET}@box"}]},
        {"sinks": [{"kind": "${SECRET}"}]},
        {"policy": "${SECRET}"},
    ],
    ids=str,
)
def test_config_messages_hide_environment_values(tmp_path, secret, keys):
    with pytest.raises(InputError) as error:
        load_config(write_config(tmp_path, **keys), {"SECRET": secret})
    assert secret[:6] not in str(error.value) and error.value.__cause__ is None


def test_config_without_sinks_uses_stdout(tmp_path):
    assert load_config(write_config(tmp_path, sinks=None)).sinks == (JsonLinesConfig(),)


@pytest.mark.parametrize(("keys", "key", "fault"), [
    ({"budgets": 1}, "budgets", "unknown key"),
    ({"cameras": {"left": {"source": "x", "rate": 3}}}, "cameras.left.rate", "unknown key"),
    ({"bundle": None}, "bundle", "this key is missing"),
    ({"budget": None}, "memory", "says nothing of how much memory the box may take"),
    ({"budget": "lots"}, "budget", "'lots' is not a size"),
    ({"cameras": {}}, "cameras", "is empty; add at least one"),
    ({"cameras": {"left": {"source": "x", "fps": 0}}}, "cameras.left.fps", "greater than or equal to"),
    ({"device": "tpu"}, "device", "'cpu'"),
    ({"late": "never"}, "late", "'drop'"),
    ({"objective": "speed"}, "objective", "'accuracy'"),
    ({"engine": "onnx", "precision": "bf16"}, "precision", "onnx has no option precision; it has: provider"),
    ({"engine": "torch", "provider": "cuda"}, "provider", "torch has no option provider; it has: precision"),
    ({"engine": "auto", "provider": "cuda", "precision": "bf16"}, "provider", "no engine has all these options"),
    ({"engine": "torch", "precision": "fp8"}, "precision", "'bf16'"),
    ({"engine": "torch:precision=fp8"}, "engine.precision", "'bf16'"),
    ({"engine": "auto", "provider": "coreml"}, "provider", "'tensorrt'"),
    ({"engine": "steam"}, "engine", "there is no engine 'steam'; choose one of: auto, torch, onnx"),
    ({"sinks": [{"kind": "mqtt"}]}, "sinks[0].host", "missing"),
    ({"sinks": [{"kind": "mqtt", "host": "h", "topic": "a/#"}]}, "sinks[0].topic", "no topic to publish to"),
    ({"sinks": [{"kind": "mqtt", "host": "h", "topic": "a/{frame}"}]}, "sinks[0].topic", "{camera} and {query}"),
    ({"sinks": [{"kind": "mqtt", "host": "h", "topic": "a/{"}]}, "sinks[0].topic", "brace"),
    ({"sinks": [{"kind": "mqtt", "host": "h", "password": "p"}]}, "sinks[0]", "needs a `username`"),
    ({"sinks": [{"kind": "mqtt", "host": "h", "qos": 3}]}, "sinks[0].qos", "less than or equal to 2"),
    ({"sinks": [{"kind": "webhook", "url": "ftp://x"}]}, "sinks[0].url", "http:// or https://"),
    ({"sinks": [{"kind": "webhook", "url": "http://x:y"}]}, "sinks[0].url", "http:// or https://"),
    ({"sinks": [{"kind": "webhook", "url": "http://x", "timeout_s": 0}]}, "sinks[0].timeout_s", "greater than 0"),
    ({"sinks": [{"kind": "jsonl", "max_bytes": "lots"}]}, "sinks[0].max_bytes", "'lots' is not a size"),
    ({"sinks": [{"kind": "jsonl", "keep": -1}]}, "sinks[0].keep", "greater than or equal to 0"),
    ({"sinks": [{"kind": "fax"}]}, "sinks[0].kind", "there is no sink 'fax'"),
    ({"http": {"bind": "0.0.0.0:8080"}}, "http.bind", "there is no token"),
    ({"http": {"bind": "nowhere"}}, "http.bind", "is no address"),
    ({"http": {"names": ["https://box.example.org"]}}, "http.names[0]", "without scheme"),
    ({"updates": {"url": "https://me:pw@u/b", "public_key": "k"}}, "updates", "`token`"),
    ({"updates": {"url": "http://u/b", "public_key": "k", "ca": "ca.pem"}}, "updates", "authorities of HTTPS"),
    ({"sinks": [{"kind": "webhook", "url": "http://x", "ca": "ca.pem"}]}, "sinks[0]", "authorities of HTTPS"),
    ({"public_key": 7}, "public_key", "string"),
    ({"cameras": {"left": {"source": "x", "decode": "nvdec"}}}, "cameras.left.decode", "unknown value 'nvdec'"),
    ({"cameras": {"left": {"source": "x", "skip": "most"}}}, "cameras.left.skip", "use auto, none, nonref, nonkey"),
    ({"cameras": {"left": {"source": "x", "detect": "rtsp://a/1"}}}, "cameras.left.detect", "to the address of a"),
    ({"cameras": {"left": {"source": "rtsp://a/1", "detect": "sub"}}}, "cameras.left.detect", "to the address of a"),
    ({"cameras": {"left": {"source": "rtsp://a/1", "detect": "ftp://a/2"}}}, "cameras.left.detect", "not one of a"),
    ({"cameras": {"left": {"source": "ftp://box/x"}}}, "cameras.left.source", "not one of a camera"),
    ({"cameras": {"left": {"source": ""}}}, "cameras.left.source", "at least 1 character"),
    ({"cameras": {"left": {"source": -1}}}, "cameras.left.source", "valid string"),
    ({"budget": 1.5}, "budget", "valid string"),
    ({"cameras": {"left": {"source": 0, "decode": "vaapi"}}}, "cameras.left.decode", "not to devices"),
    ({"cameras": {"left": {"source": 0, "skip": "nonkey"}}}, "cameras.left.skip", "not to devices"),
    ({"cameras": {"left": {"source": "x", "decode": "gstreamer"}}}, "cameras.left.decode", "without GStreamer here"),
    ({"cameras": {"left": {"source": "x", "timeout_s": 0}}}, "cameras.left.timeout_s", "greater than or equal to 0.1"),
    ({"sinks": [{"kind": "jsonl", "path": "${NOWHERE_TO_BE_FOUND}"}]}, "sinks[0].path", "has no NOWHERE_TO_BE_FOUND"),
    ({"spool": {"path": "box.yaml"}}, "spool.path", "is no directory"),
    ({"spool": {"path": "spool", "max_bytes": "lots"}}, "spool.max_bytes", "'lots' is not a size"),
    ({"spool": {"path": "spool", "every_s": 0}}, "spool.every_s", "greater than or equal to 0.01"),
    ({"spool": {"every_s": 5}}, "spool.path", "missing"),
    ({"factories": ["os.system"]}, "factories[0]", "pattern"),
])  # fmt: skip
def test_config_refuses_wrong_keys_in_one_line(tmp_path, keys, key, fault):
    path = write_config(tmp_path, **keys)
    with pytest.raises(InputError) as error:
        load_config(path)
    text = str(error.value)
    assert text.startswith(f"{path}: {key}: ") and fault in text and "; " in text and "\n" not in text


@pytest.mark.parametrize(
    ("text", "fault"), [("- a\n- b\n", "is not a mapping"), ("a: [", "is not YAML"), ("", "is not a mapping")]
)
def test_config_refuses_other_files(tmp_path, text, fault):
    path = tmp_path / "box.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=fault):
        load_config(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_config_refuses_missing_device(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load_config(write_config(tmp_path, device="auto")).device == "cpu"
    with pytest.raises(InputError, match="device: this machine has no CUDA device"):
        load_config(write_config(tmp_path, device="cuda"))
