# SPDX-License-Identifier: Apache-2.0
"""Wrong requests from any Triton client: a status that tells whose fault it is, a message that tells what to change."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import grpc as grpc_core
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from build_engines.triton_server import TritonServer
from tests.server.raw_requests import arrays, column, pairs, refusal, scores, tensor
from tests.server.served import BERT, LIGHT, XLM_R, Served

SCORER = f"{BERT}_scorer"
TOKENS = [2, 7, 3]
ONES, ZEROS = [1, 1, 1], [0, 0, 0]
TOO_LONG = 513

# what is wrong -> the inputs, and what the message must hold: what was given, what is allowed
OF_A_RERANKER: dict[str, tuple[Callable[[], list[Any]], tuple[str, ...]]] = {
    "integers for texts": (
        lambda: [tensor("QUERY", [[1]], "INT32"), column("DOCUMENT", ["d"])],
        ("'QUERY' data-type is 'INT32'", "expects 'BYTES'"),
    ),
    "floats for texts": (
        lambda: [column("QUERY", ["q"]), tensor("DOCUMENT", [[1.0]], "FP32")],
        ("'DOCUMENT' data-type is 'FP32'", "expects 'BYTES'"),
    ),
    "shape [n]": (
        lambda: [tensor(name, [b"a", b"b"], "BYTES") for name in ("QUERY", "DOCUMENT")],
        ("unexpected shape for input 'DOCUMENT'", "Expected [-1,1], got [2]"),
    ),
    "shape [n, 2]": (
        lambda: [tensor(name, [[b"a", b"b"]], "BYTES") for name in ("QUERY", "DOCUMENT")],
        ("unexpected shape for input 'DOCUMENT'", "Expected [-1,1], got [1,2]"),
    ),
    "more queries than documents": (
        lambda: [column("QUERY", ["q", "q"]), column("DOCUMENT", ["d"])],
        ("'QUERY' batch size does not match other inputs",),
    ),
    "no documents": (lambda: [column("QUERY", ["q"])], ("missing required input(s) ['DOCUMENT']",)),
    "an input too many": (
        lambda: [*pairs(["q"], ["d"]), tensor("EXTRA", [[1]], "INT32")],
        ("expected 2 inputs but got 3", "'EXTRA'"),
    ),
    "an empty batch": (lambda: pairs([], []), ("got 0",)),
    "a query that is not UTF-8": (
        lambda: pairs(["q", b"caf\xe9"], ["d", "d"]),
        ("QUERY in row 1 is not valid UTF-8", "byte 0xe9 in position 3", "Send text encoded as UTF-8"),
    ),
    "a document that is not UTF-8": (
        lambda: pairs(["q"], ["d", "d", b"\xff"]),
        ("DOCUMENT in row 2 is not valid UTF-8", "byte 0xff in position 0", "Send text encoded as UTF-8"),
    ),
    "a lone surrogate": (lambda: pairs(["q"], [b"\xed\xa0\x80"]), ("DOCUMENT in row 0 is not valid UTF-8",)),
    "an empty query": (lambda: pairs(["q", ""], ["d", "d"]), ("QUERY in row 1 is empty or blank",)),
    "a blank query": (lambda: pairs([" \t\n"], ["d"]), ("QUERY in row 0 is empty or blank",)),
    "a query above the limit": (
        lambda: pairs(["x" * 400_001], ["d"]),
        ("QUERY in row 0 has 400001 bytes", "at most 400000 are allowed"),
    ),
}
OF_A_SCORER: dict[str, tuple[Callable[[], list[Any]], tuple[str, ...]]] = {
    "an id above the vocabulary": (
        lambda: arrays([[2, 99999, 3]], [ONES], [ZEROS]),
        ("input_ids reach from 2 to 99999", "allowed is 0 to {last_id}"),
    ),
    "a negative id": (
        lambda: arrays([[2, -1, 3]], [ONES], [ZEROS]),
        ("input_ids reach from -1 to 3", "allowed is 0 to {last_id}"),
    ),
    "an id beyond the mask": (
        lambda: arrays([[2, 3, 99999]], [[1, 1, 0]], [ZEROS]),
        ("input_ids reach from 2 to 99999",),
    ),
    "padding on the left": (
        lambda: arrays([TOKENS, [0, 2, 3]], [ONES, [0, 1, 1]], [ZEROS, ZEROS]),
        ("attention_mask must be 1 for at least one token of each row, then 0", "row 1 is [0 1 1]"),
    ),
    "a hole in the mask": (
        lambda: arrays([TOKENS], [[1, 0, 1]], [ZEROS]),
        (
            "attention_mask must",
            "row 0 is [1 0 1]",
        ),
    ),
    "no token at all": (
        lambda: arrays([TOKENS], [ZEROS], [ZEROS]),
        (
            "attention_mask must",
            "row 0 is [0 0 0]",
        ),
    ),
    "a mask of twos": (
        lambda: arrays([TOKENS], [[2, 1, 0]], [ZEROS]),
        (
            "attention_mask must",
            "row 0 is [2 1 0]",
        ),
    ),
    "a mask that overflows": (
        lambda: arrays([TOKENS], [[2**62, 2**62, 1]], [ZEROS]),
        ("attention_mask must be 1 for at least one token", "row 0 is [4611686018427387904"),
    ),
    "a mask of another shape": (
        lambda: arrays([TOKENS], [[1, 1]], [ZEROS]),
        ("'input_ids': (1, 3)", "'attention_mask': (1, 2)", "Send equal shapes"),
    ),
    "segment ids of another shape": (
        lambda: arrays([TOKENS], [ONES], [[0, 0, 0, 0]]),
        ("'input_ids': (1, 3)", "'token_type_ids': (1, 4)"),
    ),
    "a third segment": (
        lambda: arrays([TOKENS], [ONES], [[0, 0, 2]]),
        ("token_type_ids must be 0 or 1", "reach from 0 to 2"),
    ),
    "more tokens than max_length": (
        lambda: arrays([[2] * TOO_LONG], [[1] * TOO_LONG], [[0] * TOO_LONG]),
        ("has 513 tokens", "at most 512"),
    ),
    "rows without tokens": (
        lambda: arrays([[]], [[]], [[]]),
        ("attention_mask must be 1 for at least one token", "row 0 is []"),
    ),
    "narrow integers": (
        lambda: [tensor("input_ids", [TOKENS], "INT32"), *arrays([TOKENS], [ONES], [ZEROS])[1:]],
        ("'input_ids' data-type is 'INT32'", "expects 'INT64'"),
    ),
    "no segment ids": (lambda: arrays([TOKENS], [ONES]), ("missing required input(s) ['token_type_ids']",)),
}


def assert_still_answers(grpc: Any) -> None:
    assert len(scores(grpc, BERT, pairs(["query"], ["one", "two"]))) == 2


@pytest.mark.parametrize("wrong", OF_A_RERANKER)
def test_a_wrong_request_to_a_reranker_is_refused_with_what_was_given_and_what_is_allowed(
    grpc: Any, wrong: str
) -> None:
    make, expected = OF_A_RERANKER[wrong]
    status, message = refusal(grpc, BERT, make())
    assert status == "INVALID_ARGUMENT", message
    assert [part for part in expected if part not in message] == [], message
    assert_still_answers(grpc)


@pytest.mark.parametrize("wrong", OF_A_SCORER)
def test_a_wrong_request_to_a_scorer_is_refused_with_what_was_given_and_what_is_allowed(
    grpc: Any, served: Served, wrong: str
) -> None:
    make, expected = OF_A_SCORER[wrong]
    last_id = vocabulary(served) - 1
    status, message = refusal(grpc, SCORER, make())
    assert status == "INVALID_ARGUMENT", message
    assert [part for part in expected if part.format(last_id=last_id) not in message] == [], message
    assert_still_answers(grpc)


def vocabulary(served: Served) -> int:
    return int(json.loads((served.checkpoints[BERT] / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def test_a_long_refused_mask_makes_no_long_message(grpc: Any) -> None:
    mask = [0, *[1] * 400]
    _, message = refusal(grpc, SCORER, arrays([[2] * 401], [mask], [[0] * 401]))
    assert len(message) < 400


def test_segment_ids_sent_to_a_graph_without_them_are_refused(grpc: Any) -> None:
    status, message = refusal(grpc, f"{XLM_R}_scorer", arrays([TOKENS], [ONES], [ZEROS]))
    assert status == "INVALID_ARGUMENT"
    assert "expected 2 inputs but got 3" in message


def test_one_wrong_row_is_refused_whatever_stands_around_it(grpc: Any) -> None:
    for row in (0, 31, 63):
        documents: list[str | bytes] = ["fine"] * 64
        documents[row] = b"\xc3\x28"
        status, message = refusal(grpc, LIGHT, pairs(["q"], documents))
        assert status == "INVALID_ARGUMENT"
        assert f"DOCUMENT in row {row} is not valid UTF-8" in message


@pytest.mark.parametrize("model", ["no_such_model", "light", f"{LIGHT}_"])
def test_an_unknown_model_is_not_found(grpc: Any, model: str) -> None:
    status, message = refusal(grpc, model, pairs(["q"], ["d"]))
    assert status == "NOT_FOUND"
    assert f"'{model}' is not found" in message
    assert_still_answers(grpc)


@pytest.mark.parametrize("model", [BERT, f"{BERT}_tokenizer"])
def test_an_unknown_version_is_not_found(grpc: Any, model: str) -> None:
    status, message = refusal(grpc, model, pairs(["q"], ["d"]), version="7")
    assert status == "NOT_FOUND"
    assert f"'{model}' version 7 is not found" in message
    assert_still_answers(grpc)


# Texts travel as a length of four bytes and the bytes themselves.
@pytest.mark.parametrize(
    "payload",
    [b"", b"\x05", struct.pack("<I", 5) + b"ab", struct.pack("<I", 2) + b"abcd", struct.pack("<I", 2**32 - 1) + b"ab"],
    ids=["nothing", "half a length", "too few bytes", "too many bytes", "four gigabytes announced"],
)
def test_bytes_that_are_no_text_tensor_are_refused(grpc: Any, server: TritonServer, payload: bytes) -> None:
    request = service_pb2.ModelInferRequest(model_name=BERT)
    for name in ("QUERY", "DOCUMENT"):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(payload)
    with grpc_core.insecure_channel(server.grpc_url) as channel:
        with pytest.raises(grpc_core.RpcError) as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
        assert caught.value.code() is grpc_core.StatusCode.INVALID_ARGUMENT
    assert_still_answers(grpc)
