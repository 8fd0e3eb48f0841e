"""The table of failures, as a person meets it."""

from __future__ import annotations

import ast
import re
from http import HTTPStatus
from pathlib import Path

import pytest

import mediamill
from mediamill.failures import (
    BY_NAME,
    Code,
    Failure,
    LeaseLost,
    Problem,
    Refused,
    Verdict,
    limit_exceeded,
)

SOURCE = Path(mediamill.__file__).parent


def rows_in_the_source() -> list[str]:
    """The names as written: an Enum folds a second name for an equal row into the first."""
    tree = ast.parse((SOURCE / "failures.py").read_text())
    table = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Code")
    return [n.targets[0].id for n in table.body if isinstance(n, ast.Assign)]  # type: ignore[attr-defined]


def test_every_row_is_a_code_of_its_own() -> None:
    names = rows_in_the_source()
    assert len(names) > 40
    assert [code.name for code in Code] == names
    assert len(set(names)) == len(names)
    assert len({code.title for code in Code}) == len(names)


def test_names_are_snake_case_and_found_again() -> None:
    for code in Code:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code.code)
        assert BY_NAME[code.code] is code
    assert len(BY_NAME) == len(Code)


@pytest.mark.parametrize("code", list(Code), ids=lambda c: c.code)
def test_a_row_reads_well(code: Code) -> None:
    if code is not Code.CHUNK_CORRUPTED:  # tus has a status of its own for it
        assert HTTPStatus(code.status) >= HTTPStatus.BAD_REQUEST
    for text in (code.title, code.advice):
        assert text == text.strip()
        assert text[0].isupper() or text[0] == "`"
        assert text.endswith(".")
        assert "  " not in text
    assert len(code.title) < 100
    assert code.title != code.advice


@pytest.mark.parametrize("code", list(Code), ids=lambda c: c.code)
def test_a_row_names_no_internals(code: Code) -> None:
    said = f"{code.title} {code.advice}"
    assert not re.search(
        r"/(usr|var|tmp|home|etc)\b|SELECT|asyncpg|pgqueuer|traceback|exception|stderr|errno"
        r"|SQL|uvicorn|pydantic|https?://",
        said,
        re.IGNORECASE,
    )


def test_only_what_may_succeed_later_is_called_retryable() -> None:
    for code in Code:
        assert code.retryable == (code.verdict is not Verdict.PERMANENT)
    assert not any(code.retryable for code in Code if code.status in (400, 401, 403, 404, 410, 415))
    assert all(code.retryable for code in Code if code.status >= 500)


def test_the_advice_of_a_row_is_possible() -> None:
    """A canceled job cannot be replayed (see states.py), so nobody is told to."""
    assert "replay" not in Code.CANCELED.advice.lower()


def test_every_code_that_is_named_in_the_source_is_in_the_table() -> None:
    used = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\bCode\.([A-Z][A-Z_]+)\b", path.read_text())
    }
    assert used <= {code.name for code in Code}


def test_a_problem_is_stored_as_it_is_shown() -> None:
    problem = Problem(Code.CORRUPT_INPUT)
    assert problem.as_dict() == {
        "code": "corrupt_input",
        "title": Code.CORRUPT_INPUT.title,
        "detail": Code.CORRUPT_INPUT.title,
        "advice": Code.CORRUPT_INPUT.advice,
        "retryable": False,
    }
    failure = limit_exceeded("pixels", allowed=100_000_000, seen=1.5e9, unit="pixels")
    assert failure.code is Code.RESOURCE_LIMIT
    shown = failure.problem.as_dict()
    assert shown["limit"] == {
        "name": "pixels",
        "allowed": 100_000_000,
        "seen": 1.5e9,
        "unit": "pixels",
    }
    assert "100,000,000" in shown["detail"]
    assert "1,500,000,000" in shown["detail"]


def test_the_exceptions_are_three() -> None:
    assert not issubclass(Failure, Refused)
    assert not issubclass(Refused, Failure)
    assert not issubclass(LeaseLost, Failure | Refused)
    refused = Refused(Code.GONE, "It is gone.", errors=[{"pointer": "/x"}])
    assert str(refused) == "gone: It is gone."
    assert refused.errors == [{"pointer": "/x"}]
