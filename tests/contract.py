"""What a change of an OpenAPI document breaks for clients that were written against the old one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SUCCESS = ("200", "201", "202", "204", "307")


def breaking(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every break, as a sentence. More paths, optional fields and answers are none."""
    return list(_breaks(old, new))


def _breaks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for path, methods in old["paths"].items():
        for method, before in methods.items():
            after = new["paths"].get(path, {}).get(method)
            where = f"{method.upper()} {path}"
            if after is None:
                yield f"{where} is gone"
                continue
            yield from _parameters(where, before, after)
            yield from _bodies(where, before, after, old, new)
            yield from _answers(where, before, after, old, new)
    for name in old.get("webhooks", {}):
        if name not in new.get("webhooks", {}):
            yield f"the webhook {name} is gone"
    for name, schema in old.get("components", {}).get("schemas", {}).items():
        after = new.get("components", {}).get("schemas", {}).get(name)
        if name == "Event":
            yield from _shape(name, schema, after or {}, old, new, asked=False)


def _parameters(where: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    was = {(p["in"], p["name"]): p for p in before.get("parameters", ())}
    now = {(p["in"], p["name"]): p for p in after.get("parameters", ())}
    for key in was.keys() - now.keys():
        yield f"{where}: the parameter {key[1]} is gone"
    for key, parameter in now.items():
        required = parameter.get("required", False)
        if required and not was.get(key, {}).get("required", False):
            yield f"{where}: the parameter {key[1]} has become required"
        if key in was and was[key]["schema"].get("type") != parameter["schema"].get("type"):
            yield f"{where}: the parameter {key[1]} has another type"


def _bodies(
    where: str, before: dict[str, Any], after: dict[str, Any], old: Any, new: Any
) -> Iterator[str]:
    was = before.get("requestBody", {}).get("content", {})
    now = after.get("requestBody", {}).get("content", {})
    if after.get("requestBody", {}).get("required") and not before.get("requestBody"):
        yield f"{where} wants a body now"
    for kind, content in was.items():
        if kind not in now:
            yield f"{where} takes {kind} no more"
        else:
            yield from _shape(
                f"{where} body", content["schema"], now[kind]["schema"], old, new, asked=True
            )


def _answers(
    where: str, before: dict[str, Any], after: dict[str, Any], old: Any, new: Any
) -> Iterator[str]:
    for status in _SUCCESS:
        was, now = before["responses"].get(status), after["responses"].get(status)
        if was is None:
            continue
        if now is None:
            yield f"{where} answers {status} no more"
            continue
        for kind, content in was.get("content", {}).items():
            schema = now.get("content", {}).get(kind, {}).get("schema", {})
            yield from _shape(
                f"{where} {status}", content.get("schema", {}), schema, old, new, asked=False
            )


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
    return schema


def _shape(
    where: str,
    was: dict[str, Any],
    now: dict[str, Any],
    old: dict[str, Any],
    new: dict[str, Any],
    *,
    asked: bool,
    depth: int = 0,
) -> Iterator[str]:
    """`asked`: what a client sends may only become freer; what it gets may only grow."""
    was, now = _resolved(was, old), _resolved(now, new)
    if depth > 8 or not was:
        return
    types, later = _types(was, old), _types(now, new)
    if (asked and types - later) or (not asked and later - types):
        yield f"{where}: the type {sorted(types)} has become {sorted(later)}"
    if "enum" in was and "enum" in now:
        lost, more = set(was["enum"]) - set(now["enum"]), set(now["enum"]) - set(was["enum"])
        if asked and lost:
            yield f"{where} takes {sorted(lost)} no more"
        if not asked and more:  # a new state, for instance
            yield f"{where} may be {sorted(more)} now"
    if asked:
        yield from _tightened(where, was, now)
    before, after = was.get("properties", {}), now.get("properties", {})
    for name in before.keys() - after.keys():
        yield f"{where}: {name} is gone"
    if asked:
        for name in set(now.get("required", ())) - set(was.get("required", ())):
            yield f"{where}: {name} has become required"
    for name in before.keys() & after.keys():
        inner = f"{where}/{name}"
        yield from _shape(inner, before[name], after[name], old, new, asked=asked, depth=depth + 1)
    if "items" in was and "items" in now:
        yield from _shape(
            f"{where}[]", was["items"], now["items"], old, new, asked=asked, depth=depth + 1
        )


def _types(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for part in [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        kind = _resolved(part, document).get("type", [])
        found |= {kind} if isinstance(kind, str) else set(kind)
    return found


def _tightened(where: str, was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        if name in now and now[name] < was.get(name, float("inf")):
            yield f"{where}: {name} has become {now[name]}"
    for name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        if name in now and now[name] > was.get(name, float("-inf")):
            yield f"{where}: {name} has become {now[name]}"
    if now.get("pattern") not in (None, was.get("pattern")):
        yield f"{where}: another pattern"
