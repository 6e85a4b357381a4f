# SPDX-License-Identifier: Apache-2.0
"""Arguments -> values that are safe to send. Each refusal names what was given and what is allowed. Pure."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence

from ._errors import InvalidRequest

# A version is an int64 on the server.
_VERSION = re.compile(r"[1-9][0-9]{0,17}")

_picture = reprlib.Repr()
_picture.maxstring = _picture.maxother = 60


def encode_query(query: object) -> bytes:
    """UTF-8 of a query that is a string and not blank."""
    return _encode_query(query, "query")


def encode_documents(documents: object, text_key: str) -> list[bytes]:
    """UTF-8 of every document; an empty or blank one is a document like any other."""
    members = _check_list(documents, "documents", "strings or mappings")
    return [_encode_document(document, row, text_key) for row, document in enumerate(members)]


def encode_pairs(pairs: object) -> tuple[list[bytes], list[bytes]]:
    """UTF-8 of the queries and of the documents of (query, document) pairs."""
    queries: list[bytes] = []
    documents: list[bytes] = []
    for row, pair in enumerate(_check_list(pairs, "pairs", "(query, document) tuples")):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidRequest(f"pairs[{row}] must be a (query, document) tuple of two strings, got {_shown(pair)}.")
        queries.append(_encode_query(pair[0], f"the query of pairs[{row}]"))
        document = pair[1]
        if not isinstance(document, str):
            raise InvalidRequest(f"the document of pairs[{row}] must be a string, got {_shown(document)}.")
        documents.append(_encode(document, f"the document of pairs[{row}]"))
    return queries, documents


def check_top_n(top_n: object) -> int | None:
    """`top_n` as given: None for all, or a whole number from 1; it may exceed the number of documents."""
    if top_n is None:
        return None
    return check_count(top_n, "top_n", 1, "leave it out to get all documents")


def check_count(value: object, name: str, least: int, remedy: str) -> int:
    """A whole number of at least `least`; True and 3.0 are not whole numbers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"{name} must be a whole number of at least {least}, got {_shown(value)}; {remedy}.")
    return value


def check_timeout_s(timeout_s: object) -> float:
    """A finite number of seconds above 0."""
    value_s = math.nan
    if isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool):
        value_s = float(timeout_s)
    if not (math.isfinite(value_s) and value_s > 0):
        raise InvalidRequest(f"timeout_s must be a finite number of seconds above 0, got {_shown(timeout_s)}.")
    return value_s


def version_name(model_version: object) -> str:
    """A version as the wire spells it: its digits, or "" for the server's choice."""
    if model_version is None:
        return ""
    text = str(model_version) if isinstance(model_version, (int, str)) else ""
    if not _VERSION.fullmatch(text):
        raise InvalidRequest(
            "model_version must be a whole number from 1, or None for the server's choice, "
            f"got {_shown(model_version)}."
        )
    return text


def _check_list(value: object, name: str, members: str) -> Sequence[object]:
    if isinstance(value, str):
        raise InvalidRequest(f"{name} must be a list of {members}, got one string; put it into a list: [{name}].")
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list or tuple of {members}, got {_shown(value)}; try list(...).")
    return value


def _encode_query(query: object, name: str) -> bytes:
    if not isinstance(query, str):
        raise InvalidRequest(f"{name} must be a string, got {_shown(query)}.")
    if not query.strip():
        raise InvalidRequest(f"{name} is blank ({_shown(query)}); it must hold more than whitespace.")
    return _encode(query, name)


def _encode_document(document: object, row: int, text_key: str) -> bytes:
    name = f"documents[{row}]"
    if isinstance(document, Mapping):
        if text_key not in document:
            raise InvalidRequest(
                f"{name} has no key {text_key!r}; its keys are: {_ascii(list(document))}. "
                f"Add it, or build the client with the right text_key."
            )
        text, name, allowed = document[text_key], f"{name}[{text_key!r}]", "a string"
    else:
        text, allowed = document, f"a string, or a mapping with the key {text_key!r}"
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be {allowed}, got {_shown(text)}.")
    return _encode(text, name)


def _encode(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as cause:
        raise InvalidRequest(
            f"{name} cannot be sent as UTF-8: character {cause.start} is the lone surrogate "
            f"U+{ord(text[cause.start]):04X}. Repair the text where it was decoded."
        ) from cause


def _shown(value: object) -> str:
    return f"{_ascii(value)} ({type(value).__name__})"


def _ascii(value: object) -> str:
    """A short picture of any value; a lone surrogate in a message could not even be printed."""
    return _picture.repr(value).encode("ascii", "backslashreplace").decode()
