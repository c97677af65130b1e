"""What /openapi.json says: the schemas of the bodies, which the routes read under limits of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from nextn.server.fields import Strict

_REFERENCE = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


def describe(app: FastAPI, bodies: Mapping[str, type[Strict]]) -> None:
    """Make the application's document name the body of each path in `bodies`, and the errors of all."""
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_document(app, bodies))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, bodies: Mapping[str, type[Strict]]) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models: list[type[BaseModel]] = [*dict.fromkeys(bodies.values()), ErrorBody]
    names, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    made["components"] = {"schemas": schemas["$defs"]}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own errors, which no route here has
            operation["responses"]["default"] = {
                "description": "An error in OpenAI's shape",
                "content": _json(names[ErrorBody, "validation"]),
            }
            if path in bodies:
                operation["requestBody"] = {
                    "required": True,
                    "content": _json(names[bodies[path], "validation"]),
                }
    return made


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}
