# SPDX-License-Identifier: Apache-2.0
"""Step `pairing`: checkpoint -> `tokenizer.json` without control tokens, and `pairing.json`, the way pairs are joined.

The layout is read off the checkpoint's tokenizer.json rather than kept in a list of families (a decoder's is the prompt
of its row), and the golden ids come from that file too, so that what is served is compared with something it did not
compute. The file is read with the tokenizers library alone: transformers 5 rebuilds some tokenizers from their class
name and may read text differently.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from build_engines.errors import CheckpointError
from build_engines.fetch import Checkpoint
from build_engines.hashing import sha256_file
from build_engines.prompt_layout import (
    GOOD_PAIR,
    bos_id,
    control_ids,
    ids_of,
    load_tokenizer,
    pad_id,
    prompt_layout,
    verdict_ids,
)
from build_engines.serving_code import pair_encoding
from build_engines.table import Reranker

_GOLDEN_TEXTS = [
    GOOD_PAIR,
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

    reference = load_tokenizer(checkpoint.folder)
    if checkpoint.is_decoder != (reranker.prompt is not None):
        raise CheckpointError(
            f"{reranker.name}: a {checkpoint.model_type} checkpoint "
            + ("needs a prompt" if checkpoint.is_decoder else "takes no prompt")
            + " in rerankers.toml."
        )
    layout = prompt_layout(reference, reranker.prompt) if reranker.prompt else _layout(reference, reranker)
    source = json.loads((checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))
    padding = pad_id(checkpoint)
    if reranker.prompt is None:
        control = _control_ids(source, layout, padding)
    else:
        control = control_ids(reference) | ({padding} & {t["id"] for t in source["added_tokens"]})
        _check_end(reranker, layout, padding)
        _check_start(checkpoint, reference, reranker, layout)
    (out / "tokenizer.json").write_text(
        json.dumps(without_control_tokens(source, control), ensure_ascii=False), encoding="utf-8"
    )
    served = Tokenizer.from_file(str(out / "tokenizer.json"))
    _check_control_tokens(source, served, control)
    if served.get_vocab_size() > int(checkpoint.config["vocab_size"]):
        raise CheckpointError(
            f"{checkpoint.folder}: the tokenizer has {served.get_vocab_size()} ids, the model has embeddings for "
            f"{checkpoint.config['vocab_size']}. They do not belong together; fetch the checkpoint again."
        )
    typed = " ".join(t["content"] for t in source["added_tokens"] if t["special"] or t["id"] in control)
    try:
        pairing = pair_encoding.Pairing(
            **layout,
            query_max=reranker.query_max(_control_length(layout)),
            max_length=reranker.max_length,
            buckets=reranker.buckets,
            pad_id=padding,
            control_ids=tuple(sorted(control)),
            tokenizer_sha256=sha256_file(out / "tokenizer.json"),
            golden=_golden(reference, served, layout, reranker, typed),
        )
    except pair_encoding.PairingError as error:
        raise CheckpointError(f"{reranker.name}: {error} Raise max_length and the last bucket.") from error
    (out / "pairing.json").write_text(json.dumps(asdict(pairing), ensure_ascii=False), encoding="utf-8")
    pair_encoding.PairEncoder.load(out, cache_bytes=1 << 20, max_text_bytes=1 << 20)
    facts: dict[str, Any] = {"golden_pairs": len(pairing.golden), "control_tokens_in_a_pair": pairing.control_length}
    if reranker.head == "yes_no" and reranker.prompt:
        facts["verdict_ids"] = verdict_ids(reference, reranker.prompt)
    return facts


def without_control_tokens(source: dict[str, Any], control: set[int]) -> dict[str, Any]:
    """Return a tokenizer.json that splits text exactly as before but can never produce a control id."""
    served = dict(source, post_processor=None, truncation=None, padding=None)
    served["added_tokens"] = [t for t in source["added_tokens"] if not t["special"] and t["id"] not in control]
    model = source["model"]
    if model.get("type") == "Unigram":
        # SentencePiece never matches control pieces in text, but the tokenizers library keeps them in the vocabulary it
        # searches. A piece with a space cannot match: spaces have become U+2581 by then. Scores stay as they are.
        vocab = [
            [f" {i} ", score] if i in control else [piece, score] for i, (piece, score) in enumerate(model["vocab"])
        ]
        served["model"] = model | {"vocab": vocab}
    return served


def _layout(reference: Any, reranker: Reranker) -> dict[str, Any]:
    query, document = ids_of(reference, "query"), ids_of(reference, "passage")
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


def _check_end(reranker: Reranker, layout: dict[str, Any], padding: int) -> None:
    # Transformers finds the end of a row by looking for padding, and would have trained the head on the token before.
    if reranker.head == "sequence_classification" and layout["suffix_ids"][-1:] == (padding,):
        raise CheckpointError(
            f"{reranker.name}: its prompt ends in the padding token {padding}, which Transformers does not count as "
            "the end of a pair. Leave it out of the suffix, or set another pad_token_id in config.json."
        )


def _check_start(checkpoint: Checkpoint, reference: Any, reranker: Reranker, layout: dict[str, Any]) -> None:
    """Raise CheckpointError for a prompt with two BOS, or with none where the tokenizer would have put one."""
    bos = bos_id(checkpoint, reference)
    if bos is None:
        return
    found, first = layout["prefix_ids"].count(bos.id), layout["prefix_ids"][:1] == (bos.id,)
    if found > 1 or (bos.added and not first):
        raise CheckpointError(
            f"{reranker.name}: its prompt has {found} {reference.id_to_token(bos.id)!r}; this tokenizer puts one "
            "before a text, and so must the prefix of the prompt, once and at its very beginning."
        )


def _control_length(layout: dict[str, Any]) -> int:
    return sum(len(layout[segment]) for segment in ("prefix_ids", "middle_ids", "suffix_ids"))


def _check_control_tokens(source: dict[str, Any], served: Any, control: set[int]) -> None:
    for token in source["added_tokens"]:
        content = token["content"]
        if not token["special"] and token["id"] not in control:
            if served.token_to_id(content) != token["id"]:
                raise CheckpointError(f"The added token {content!r} would change its id; it cannot be served.")
            continue
        for text in (content, f"a{content}b", f"a {content} b"):
            leaked = control.intersection(ids_of(served, text))
            if leaked:
                raise CheckpointError(
                    f"Text {text!r} from a user would become the control ids {sorted(leaked)}; this tokenizer cannot "
                    "be served safely."
                )


def _golden(
    reference: Any, served: Any, layout: dict[str, Any], reranker: Reranker, typed: str
) -> tuple[pair_encoding.GoldenPair, ...]:
    prefix, middle, suffix = layout["prefix_ids"], layout["middle_ids"], layout["suffix_ids"]
    control = _control_length(layout)
    query_max = reranker.query_max(control)
    golden = []
    for query, document in [*_GOLDEN_TEXTS, (typed, typed)]:
        # The checkpoint's tokenizer makes typed control tokens control ids; that text is golden against ourselves.
        q, d = (
            ids_of(
                served if text == typed else reference,
                text.join((layout.get(f"{n}_head", ""), layout.get(f"{n}_tail", ""))),
            )
            for n, text in (("query", query), ("document", document))
        )
        kept = _cut(q, query_max, layout.get("query_tail_ids", ()))
        room = reranker.max_length - control - len(kept)
        ids = (*prefix, *kept, *middle, *_cut(d, room, layout.get("document_tail_ids", ())), *suffix)
        tokens = len(q) + len(d) + control
        if tokens <= reranker.max_length and len(q) <= query_max and query != typed:
            _check_pair(reference, reranker, query, document, ids)
        golden.append(pair_encoding.GoldenPair(query, document, ids, tokens))
    return tuple(golden)


def _cut(ids: list[int], limit: int, tail: tuple[int, ...]) -> list[int]:
    return ids if len(ids) <= limit else [*ids[: limit - len(tail)], *tail]


def _check_pair(reference: Any, reranker: Reranker, query: str, document: str, ids: tuple[int, ...]) -> None:
    if reranker.prompt is not None:
        return  # prompt_layout has tried more
    if reranker.head == "bi_encoder":
        expected = [*reference.encode(query).ids, *reference.encode(document).ids]
    else:
        expected = reference.encode(query, document).ids
    if tuple(expected) != ids:
        raise CheckpointError(
            f"The pair {query!r} / {document!r} joined from its parts is {ids}, the checkpoint's tokenizer gives "
            f"{tuple(expected)}. Its texts cannot be tokenised apart, which this project needs."
        )
