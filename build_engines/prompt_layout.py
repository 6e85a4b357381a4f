# SPDX-License-Identifier: Apache-2.0
"""A prompt in the ids of a checkpoint's tokenizer: its segments, its verdicts, and the proof that it may be cut.

Texts are tokenised apart from the prompt, so that their ids can be kept. That is right only where the tokenizer has a
boundary at each cut whatever the text is. The places are chosen for how these tokenizers split (a space belongs to the
word after it, a line break to the punctuation before it, a control token to nothing) and are tried here with texts that
begin and end in each kind of character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from build_engines.errors import CheckpointError
from build_engines.fetch import Checkpoint
from build_engines.prompts import Prompt

# A pair that any reranker should find relevant.
GOOD_PAIR = ("what is a panda?", "The giant panda is a bear species endemic to China.")

# Kinds of characters at which tokenizers do or do not split, and some that normalisers change or join.
_EDGES = (
    "a", "Z", "7", "42", ".", "?", "...", '"', "'", "'s", "(", ")", ":", "-", "_", "#", "/", "<", ">", "|", "€", "½",
    " ", "  ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\u200b", "\u200d", "\ufeff",
    "\u0301", "e\u0301", "é", "ﬁ", "中", "。", "の", "ら\u309a", "한", "ᄒ", "א", "ب", "ไ", "क\u094d", "👩\u200d👧",
    "❤\ufe0f", "\U0001f1e8", "\x01", "\x7f",
)  # fmt: skip


# What control tokens look like. `<Query>` and the like are text, and so is Llama 2's `[INST]`.
_CONTROL = re.compile(r"<[|｜][^<>\s]+[|｜]>|</?(?:s|bos|eos|pad|think|start_of_turn|end_of_turn)>|\[(?:SEP|CLS)\]")


def load_tokenizer(folder: Path) -> Any:
    """Return the checkpoint's own tokenizer as the tokenizers library has it; raise CheckpointError if damaged."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is damaged ({error}). Fetch it again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text alone, nothing added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def prompt_layout(tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Return the fields of Pairing that a prompt decides; raise CheckpointError where it cannot be cut as it says."""
    _check_round_trip(tokenizer, prompt)
    _check_instruction(tokenizer, prompt)
    _check_control_tokens(tokenizer, prompt)
    layout = _segments(tokenizer, prompt)
    for text, around in (("query", prompt.around_query), ("document", prompt.around_document)):
        head, tail = around
        layout |= {f"{text}_head": head, f"{text}_tail": tail, f"{text}_tail_ids": tuple(ids_of(tokenizer, tail))}
    if not prompt.apart:
        texts = [*_EDGES, *(edge + "a" for edge in _EDGES), *("a" + edge for edge in _EDGES)]
        for text in texts:
            _check_whole(tokenizer, prompt, layout, text, "a")
            _check_whole(tokenizer, prompt, layout, "a", text)
        _check_whole(tokenizer, prompt, layout, "a", "")
    return layout


def good_pair_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the ids in which a pair is asked about that any reranker should find relevant."""
    return _joined(tokenizer, prompt, _segments(tokenizer, prompt), *GOOD_PAIR)


def _segments(tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Return the ids of the segments that are the same for every pair, by their names in Pairing."""
    return {
        f"{segment}_ids": tuple(i for text in prompt.pieces(segment) for i in ids_of(tokenizer, text))
        for segment in ("prefix", "middle", "suffix")
    }


def _joined(tokenizer: Any, prompt: Prompt, layout: dict[str, Any], query: str, document: str) -> list[int]:
    """Return the ids of a pair joined from its parts, nothing cut."""
    texts = (query.join(prompt.around_query), document.join(prompt.around_document))
    query_ids, document_ids = (ids_of(tokenizer, text) for text in texts)
    return [*layout["prefix_ids"], *query_ids, *layout["middle_ids"], *document_ids, *layout["suffix_ids"]]


def _check_whole(tokenizer: Any, prompt: Prompt, layout: dict[str, Any], query: str, document: str) -> None:
    """Raise CheckpointError where the ids of the whole prompt are others than those of its parts."""
    parts, whole = _joined(tokenizer, prompt, layout, query, document), ids_of(tokenizer, prompt.whole(query, document))
    if parts == whole:
        return
    at = next((i for i, (a, b) in enumerate(zip(parts, whole, strict=False)) if a != b), min(len(parts), len(whole)))
    raise CheckpointError(
        f"The prompt {prompt.name} reads differently in parts: for the query {query!r} and the document {document!r} "
        f"the whole has {_shown(tokenizer, whole, at)} where its parts have {_shown(tokenizer, parts, at)}. Move the "
        "characters that the tokenizer joins to a text into query or document, such as the space before a text or the "
        "line break after it, in [prompts] of rerankers.toml."
    )


def verdict_ids(tokenizer: Any, prompt: Prompt) -> tuple[int, int | None]:
    """Return the ids of yes and no (None where the prompt has no `no`); raise CheckpointError unless each is one token.

    They must be what the tokenizer makes of the verdict directly after the prompt, not only of the verdict alone.
    """
    yes = _verdict_id(tokenizer, prompt, prompt.yes)
    return yes, _verdict_id(tokenizer, prompt, prompt.no) if prompt.no else None


def _verdict_id(tokenizer: Any, prompt: Prompt, verdict: str) -> int:
    ids = ids_of(tokenizer, verdict)
    if len(ids) != 1:
        raise CheckpointError(
            f"The verdict {verdict!r} of the prompt {prompt.name} is {len(ids)} tokens ({_shown(tokenizer, ids, 0)}); "
            "a verdict must be one, since the score is read off the next token alone. Choose another word."
        )
    before = prompt.whole(*GOOD_PAIR)
    if not prompt.apart and ids_of(tokenizer, before + verdict) != [*ids_of(tokenizer, before), *ids]:
        raise CheckpointError(
            f"The verdict {verdict!r} is not the token {ids[0]} after the prompt {prompt.name}, whose end it is joined "
            "to. Give it as it follows there, with a space before it if the tokenizer expects one."
        )
    return ids[0]


class Bos(NamedTuple):
    """The beginning-of-text token, and whether the tokenizer puts it before a text by itself."""

    id: int
    added: bool


def bos_id(checkpoint: Checkpoint, tokenizer: Any) -> Bos | None:
    """Return the beginning-of-text token that tokenizer_config.json names, or the one that the tokenizer adds."""
    settings = _settings(checkpoint)
    content = _content(settings.get("bos_token"))
    known = tokenizer.token_to_id(content) if content else None
    around = tokenizer.encode("a").ids
    if around[:1] != ids_of(tokenizer, "a")[:1]:
        return Bos(around[0], True)
    return None if known is None else Bos(known, settings.get("add_bos_token") is True)


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return settings


def _content(token: Any) -> Any:
    """Return the text of a token, which tokenizer_config.json may hold with its properties around it."""
    return token.get("content") if isinstance(token, dict) else token


def pad_id(checkpoint: Checkpoint) -> int:
    """Return the id that fills rows; raise CheckpointError where a checkpoint names none, not even an end of text.

    Any control token will do, the end of text too: graphs see the mask, never the ids behind it.
    """
    for candidate in _pad_candidates(checkpoint):
        if isinstance(candidate, int) and 0 <= candidate < int(checkpoint.config["vocab_size"]):
            return candidate
    raise CheckpointError(f"{checkpoint.folder / 'config.json'} names neither pad_token_id nor eos_token_id; add one.")


def _pad_candidates(checkpoint: Checkpoint) -> Iterator[Any]:
    yield checkpoint.config.get("pad_token_id")
    content = _content(_settings(checkpoint).get("pad_token"))
    added = json.loads((checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    yield {token["content"]: token["id"] for token in added}.get(content)
    end = checkpoint.config.get("eos_token_id")
    yield end[0] if isinstance(end, list) and end else end


def control_ids(tokenizer: Any) -> set[int]:
    """Return all added tokens but those that text too is made of (line breaks, with some).

    Many a decoder's control tokens are not `special`.
    """
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().items()
    return {i for i, token in added if token.special or model.token_to_id(token.content) is None}


def _check_round_trip(tokenizer: Any, prompt: Prompt) -> None:
    """Decoders' tokenizers lose nothing; one that does was saved under another class (Transformers issue 45488)."""
    for text in ("How are you doing?", "   leading spaces", "a\n\n  b", "日本 👩\u200d👧"):
        read = tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False)
        if read != text:
            raise CheckpointError(
                f"tokenizer.json turns {text!r} into {read!r}, which cannot be what the checkpoint for the prompt "
                f"{prompt.name} was trained on. Some versions of Transformers save such files; take the original one."
            )


def _check_control_tokens(tokenizer: Any, prompt: Prompt) -> None:
    """Raise CheckpointError where what looks like a control token is none of this tokenizer, but several of text."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in (*prompt.prefix, *prompt.middle, *prompt.suffix, prompt.query, prompt.document):
        unknown = [token for token in _CONTROL.findall(text) if token not in added]
        if unknown:
            raise CheckpointError(
                f"The prompt {prompt.name} holds {unknown[0]!r}, which is not a token of this checkpoint but would be "
                "read as text. It is another model's prompt; name the one that the checkpoint was trained with."
            )


def _check_instruction(tokenizer: Any, prompt: Prompt) -> None:
    found = sorted(control_ids(tokenizer) & set(ids_of(tokenizer, prompt.instruction)))
    if found:
        raise CheckpointError(
            f"The instruction {prompt.instruction!r} holds the control token {tokenizer.id_to_token(found[0])!r}; "
            "write it as plain text."
        )


def _shown(tokenizer: Any, ids: list[int], at: int) -> str:
    return ", ".join(f"{i} {tokenizer.id_to_token(i)!r}" for i in ids[at : at + 4]) or "nothing"
