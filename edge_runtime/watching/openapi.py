"""The schema of what a box answers over HTTP (OpenAPI 3.1)."""

from __future__ import annotations

from typing import Any

from edge_runtime.watching.status import Status

TEXT, JSON = "text/plain", "application/json"


def openapi() -> dict[str, Any]:
    """The document of `/openapi.json`."""
    schema = Status.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "A Gemel box", "version": "1"},
        "paths": {
            "/": {"get": _get("The dashboard.",
                              {200: ("the page", "text/html"), 401: ("asks for the token", "text/html")})},
            "/healthz": {"get": _get("Whether the thread that runs queries goes on.",
                                     {200: ("it does", TEXT), 503: ("it does not", TEXT)})},
            "/readyz": {"get": _get("Whether the box has all that it needs.",
                                    {200: ("it has", JSON, _missing()), 503: ("what is missing", JSON, _missing())})},
            "/metrics": {"get": _get("Metrics for Prometheus.", {200: ("text format 0.0.4", TEXT)})},
            "/api/status": {"get": _get("The box at this moment.",
                                        {200: ("the box", JSON, {"$ref": "#/components/schemas/Status"})})},
            "/api/history": {"get": _get("The last hour, in columns.",
                                         {200: ("the columns", JSON, {"type": "object"})})},
            "/api/cameras/{id}/frame.jpg": {"get": {
                **_get("A camera's newest frame with its results.",
                       {200: ("the frame", "image/jpeg"), 404: ("no such camera, or no frame yet", TEXT)}),
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            }},
            "/api/session": {"post": _post("The token of the request becomes a cookie.", {204: ("it did", None)})},
            "/api/reload": {"post": _post("Config and bundle are taken up as they are now.",
                                          {200: ("they are applied", JSON, _applied()),
                                           409: ("they are not, and why", JSON, _applied("reason"))})},
            "/openapi.json": {"get": _get("This document.", {200: ("the document", JSON, {"type": "object"})})},
        },
        "components": {
            "schemas": {"Status": schema, **parts},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


def _get(told: str, answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    refused = {401: ("a token is needed", TEXT), 403: ("refused", TEXT)}
    return {"summary": told, "security": [{}, {"token": []}], "responses": _answers({**refused, **answers})}


def _post(told: str, answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    return {**_get(told, answers), "security": [{"token": []}]}


def _answers(answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    return {
        str(code): {"description": told, **({"content": {kind: {"schema": _schema(more)}}} if kind else {})}
        for code, (told, kind, *more) in sorted(answers.items())
    }


def _schema(more: list[Any]) -> dict[str, Any]:
    return more[0] if more else {"type": "string"}


def _applied(*more: str) -> dict[str, Any]:
    return {
        "type": "object", "required": ["applied", *more], "additionalProperties": False,
        "properties": {"applied": {"type": "boolean"}, **{name: {"type": "string"} for name in more}},
    }  # fmt: skip


def _missing() -> dict[str, Any]:
    return {
        "type": "object", "required": ["missing"],
        "properties": {"missing": {"type": "array", "items": {"type": "string"}}},
    }  # fmt: skip
