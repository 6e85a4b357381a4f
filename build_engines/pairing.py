# SPDX-License-Identifier: Apache-2.0
"""Step `pairing`: checkpoint -> `tokenizer.json` without control tokens, and `pairing.json`, the way pairs are joined.

The layout is read off the checkpoint's tokenizer.json rather than kept in a list of families, and the golden ids come
from that file too, so that what is served is compared with something it did not compute. The file is read with the
tokenizers library alone: transformers 5 rebuilds some tokenizers from their class name and may read text differently.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from build_engines.errors import CheckpointError
from build_engines.fetch import Checkpoint
from build_engines.hashing import sha256_file
from build_engines.serving_code import pair_encoding
from build_engines.table import Reranker

_GOLDEN_TEXTS = [
    ("what is a panda?", "The giant panda is a bear species endemic to China."),
    ("How are you doing?", ""),
    ("   leading spaces", "trailing spaces   "),
    ("a\n\n  b\tc", "line one\r\nline two"),
    ("ℕ 日本 👩‍👩‍👧", "什么是大熊猫？大熊猫是中国特有的熊科动物。"),
    ("Ünïcödé ﬁ ½ Ⅳ", "naïve façade, ＡＢＣ, i̇stanbul"),
    ("price of 1,234.56 kg", "It costs $1,234.56 per 1kg (approx. €1.100)."),
    ("query " * 3000, "short"),
    ("short", "document " * 3000),
    ("query " * 3000, "document " * 3000),
]


def write_pairing(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    """Write both files into `out`; raise CheckpointError where the tokenizer cannot be served faithfully."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        reference = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{checkpoint.folder / 'tokenizer.json'} is damaged ({error}). Fetch it again."
        ) from error
    reference.no_truncation()
    reference.no_padding()
    layout = _layout(reference, reranker)
    source = json.loads((checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))
    pad_id = int(checkpoint.config["pad_token_id"])
    control = _control_ids(source, layout, pad_id)
    (out / "tokenizer.json").write_text(json.dumps(without_control_tokens(source, control), ensure_ascii=False))
    served = Tokenizer.from_file(str(out / "tokenizer.json"))
    _check_control_tokens(source, served, control)
    if served.get_vocab_size() > int(checkpoint.config["vocab_size"]):
        raise CheckpointError(
            f"{checkpoint.folder}: the tokenizer has {served.get_vocab_size()} ids, the model has embeddings for "
            f"{checkpoint.config['vocab_size']}. They do not belong together; fetch the checkpoint again."
        )
    pairing = pair_encoding.Pairing(
        **layout,
        query_max=reranker.query_max,
        max_length=reranker.max_length,
        buckets=reranker.buckets,
        pad_id=pad_id,
        control_ids=tuple(sorted(control)),
        tokenizer_sha256=sha256_file(out / "tokenizer.json"),
        golden=_golden(reference, served, layout, reranker, source),
    )
    (out / "pairing.json").write_text(json.dumps(asdict(pairing), ensure_ascii=False), encoding="utf-8")
    pair_encoding.PairEncoder.load(out, cache_bytes=1 << 20, max_text_bytes=1 << 20)
    return {"golden_pairs": len(pairing.golden)}


def without_control_tokens(source: dict[str, Any], control: set[int]) -> dict[str, Any]:
    """Return a tokenizer.json that splits text exactly as before but can never produce a control id."""
    served = dict(source, post_processor=None, truncation=None, padding=None)
    served["added_tokens"] = [token for token in source["added_tokens"] if not token["special"]]
    model = source["model"]
    if model.get("type") == "Unigram":
        # SentencePiece never matches control pieces in text, but the tokenizers library keeps them in the vocabulary it
        # searches. A piece with a space cannot match: spaces have become U+2581 by then. Scores stay as they are.
        vocab = [
            [f" {i} ", score] if i in control else [piece, score] for i, (piece, score) in enumerate(model["vocab"])
        ]
        served["model"] = model | {"vocab": vocab}
    return served


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _layout(reference: Any, reranker: Reranker) -> dict[str, Any]:
    query, document = _ids(reference, "query"), _ids(reference, "passage")
    if reranker.head == "bi_encoder":
        prefix, suffix = _around(reference.encode("query").ids, query)
        middle, first = (*suffix, *prefix), len(suffix)
    else:
        pair = reference.encode("query", "passage")
        prefix, rest = _around(pair.ids, query)
        middle, suffix = _around(rest, document)
        start = len(prefix) + len(query)
        first = pair.type_ids[start : start + len(middle)].count(0)
    if not middle:
        raise CheckpointError(
            f"tokenizer.json joins a pair as {[*prefix, *query, *document, *suffix]}, with nothing between the texts: "
            "its template is missing. Save the tokenizer again with the transformers that trained the checkpoint."
        )
    return {
        "prefix_ids": prefix,
        "middle_ids": middle,
        "suffix_ids": suffix,
        "first_segment_middle": first if reranker.segment_ids else None,
    }


def _around(ids: list[int] | tuple[int, ...], part: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for at in range(len(ids) - len(part) + 1):
        if list(ids[at : at + len(part)]) == part:
            return tuple(ids[:at]), tuple(ids[at + len(part) :])
    raise CheckpointError(
        f"The tokenizer reads a pair as {list(ids)}, in which the text alone, {part}, does not occur. Its texts cannot "
        "be tokenised apart, which this project needs."
    )


def _control_ids(source: dict[str, Any], layout: dict[str, Any], pad_id: int) -> set[int]:
    special = {token["id"]: token["content"] for token in source["added_tokens"] if token["special"]}
    model = source["model"]
    # The unknown id is what unknown characters honestly become.
    unknown = {model.get("unk_id")} | {i for i, content in special.items() if content == model.get("unk_token")}
    placed = {*layout["prefix_ids"], *layout["middle_ids"], *layout["suffix_ids"], pad_id}
    return (set(special) | placed) - unknown


def _check_control_tokens(source: dict[str, Any], served: Any, control: set[int]) -> None:
    for token in source["added_tokens"]:
        content = token["content"]
        if not token["special"]:
            if served.token_to_id(content) != token["id"]:
                raise CheckpointError(f"The added token {content!r} would change its id; it cannot be served.")
            continue
        for text in (content, f"a{content}b", f"a {content} b"):
            leaked = control.intersection(_ids(served, text))
            if leaked:
                raise CheckpointError(
                    f"Text {text!r} from a user would become the control ids {sorted(leaked)}; this tokenizer cannot "
                    "be served safely."
                )


def _golden(
    reference: Any, served: Any, layout: dict[str, Any], reranker: Reranker, source: dict[str, Any]
) -> tuple[pair_encoding.GoldenPair, ...]:
    typed = " ".join(token["content"] for token in source["added_tokens"] if token["special"])
    prefix, middle, suffix = layout["prefix_ids"], layout["middle_ids"], layout["suffix_ids"]
    control = len(prefix) + len(middle) + len(suffix)
    golden = []
    for query, document in [*_GOLDEN_TEXTS, (typed, typed)]:
        # The checkpoint's tokenizer makes typed control tokens control ids; that text is golden against ourselves.
        q, d = (_ids(served if text == typed else reference, text) for text in (query, document))
        kept = q[: reranker.query_max]
        room = reranker.max_length - control - len(kept)
        ids = (*prefix, *kept, *middle, *d[:room], *suffix)
        tokens = len(q) + len(d) + control
        if tokens <= reranker.max_length and len(q) <= reranker.query_max and query != typed:
            _check_pair(reference, reranker, query, document, ids)
        golden.append(pair_encoding.GoldenPair(query, document, ids, tokens))
    return tuple(golden)


def _check_pair(reference: Any, reranker: Reranker, query: str, document: str, ids: tuple[int, ...]) -> None:
    if reranker.head == "bi_encoder":
        expected = [*reference.encode(query).ids, *reference.encode(document).ids]
    else:
        expected = reference.encode(query, document).ids
    if tuple(expected) != ids:
        raise CheckpointError(
            f"The pair {query!r} / {document!r} joined from its parts is {ids}, the checkpoint's tokenizer gives "
            f"{tuple(expected)}. Its texts cannot be tokenised apart, which this project needs."
        )
