# SPDX-License-Identifier: Apache-2.0
"""The console command `triton-rerank`. `run` raises, `main` tells."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import AsyncRerankClient, InvalidRequest, RerankClient, RerankError, Tls, __version__
from ._batch import BatchJob, Summary, run_batch
from ._table import as_json, table

TOKEN_VARIABLE = "TRITON_RERANK_TOKEN"  # noqa: S105  the name of a variable, not a token

_SUCCESS, _SOME_FAILED, _COULD_NOT_RUN = 0, 1, 2
_INTERRUPTED = 128 + 2  # what shells report for SIGINT

# A batch job has time: a model that is loaded anew is back before these are used up.
_BATCH_RETRIES = 5

_ABOUT = f"""\
Rerank documents with a reranker served by Triton Inference Server.

    triton-rerank rank "what is a panda?" "a bear from China" "a small Fiat" --top-n 1
    triton-rerank batch rows.jsonl results.jsonl --model bge_reranker

A bearer token is read from the environment variable {TOKEN_VARIABLE}, so that it shows in no process list."""

_RANK_ABOUT = """\
Order documents by how well they answer QUERY.

    triton-rerank rank "what is a panda?" "a bear from China" "a small Fiat"
    grep -rh panda notes/ | triton-rerank rank "what do pandas eat?" --file - --top-n 5
    triton-rerank rank "what is a panda?" --file documents.txt --json

Scores are raw logits: they order the documents of one query. With --normalize they are their sigmoids."""

_BATCH_ABOUT = """\
Rerank every row of INPUT, one JSON object a line:

    {"query": "what is a panda?", "documents": ["a bear", "a small Fiat"], "id": "optional"}

OUTPUT gets one line per row, in the same order:

    {"line": 1, "id": "optional", "model_version": "1", "results": [{"index": 0, "score": 7.1, "tokens": 9}, ...]}
    {"line": 2, "error": {"type": "InvalidRequest", "message": "..."}}

A row that cannot be scored is recorded and the rest go on. However the job ends, running the same command
again continues after the last complete line of OUTPUT.

Exit status: 0 all rows scored, 1 some rows failed, 2 could not run or had to stop, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; usage errors and --help leave through SystemExit."""
    parser, arguments = _parse(argv)
    run = _run_rank if arguments.command == "rank" else _run_batch
    try:
        return run(arguments)
    except RerankError as error:
        return _tell(parser, f"{type(error).__name__}: {error}", _COULD_NOT_RUN)
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted; closing stdout at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SUCCESS
    except (OSError, UnicodeDecodeError) as error:
        return _tell(parser, str(error), _COULD_NOT_RUN)
    except KeyboardInterrupt:
        hint = "; run the same command again to resume" if arguments.command == "batch" else ""
        return _tell(parser, f"interrupted{hint}", _INTERRUPTED)


def _tell(parser: argparse.ArgumentParser, text: str, status: int) -> int:
    print(f"{parser.prog}: {' '.join(text.split())}", file=sys.stderr)
    return status


def _run_rank(arguments: argparse.Namespace) -> int:
    documents = [*arguments.documents, *_file_lines(arguments.file)]
    if not documents:
        raise InvalidRequest("there are no documents; give them after the query, or name a file with --file.")
    with RerankClient(
        arguments.url,
        model=arguments.model,
        timeout_s=arguments.timeout_s,
        headers=dict(arguments.header),
        bearer_token=os.environ.get(TOKEN_VARIABLE) or None,
        tls=_tls(arguments),
    ) as client:
        hits = client.rerank(
            arguments.query,
            documents,
            top_n=arguments.top_n,
            normalize=arguments.normalize,
            model_version=arguments.model_version,
        )
    text = as_json(hits, arguments.model) if arguments.json else table(hits, shutil.get_terminal_size().columns)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)
    return _SUCCESS


def _run_batch(arguments: argparse.Namespace) -> int:
    job = BatchJob(
        source=arguments.input,
        target=arguments.output,
        overwrite=arguments.overwrite,
        concurrency=arguments.concurrency,
        stop_after=arguments.stop_after,
        top_n=arguments.top_n,
        normalize=arguments.normalize,
        model_version=arguments.model_version,
    )
    summary = asyncio.run(_batch(arguments, job))
    resumed = f" (resumed after {summary.resumed_after})" if summary.resumed_after else ""
    print(f"{summary.rows} rows{resumed}, {summary.failed} failed; see {job.target}", file=sys.stderr)
    return _SOME_FAILED if summary.failed else _SUCCESS


async def _batch(arguments: argparse.Namespace, job: BatchJob) -> Summary:
    async with AsyncRerankClient(
        arguments.url,
        model=arguments.model,
        timeout_s=arguments.timeout_s,
        max_retries=_BATCH_RETRIES,
        headers=dict(arguments.header),
        bearer_token=os.environ.get(TOKEN_VARIABLE) or None,
        tls=_tls(arguments),
    ) as client:
        return await run_batch(client, job, sys.stderr)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser("triton-rerank", description=_ABOUT, formatter_class=_FORMAT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_rank(commands)
    _add_batch(commands)
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes documents only before or after the options; taking them on both sides is no harm.
    if rest and (arguments.command != "rank" or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "rank":
        arguments.documents += rest
    return parser, arguments


_FORMAT = argparse.RawDescriptionHelpFormatter


def _add_rank(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rank = commands.add_parser(
        "rank",
        help="order documents given on the command line or in a file",
        description=_RANK_ABOUT,
        formatter_class=_FORMAT,
        allow_abbrev=False,
    )
    rank.add_argument("query", metavar="QUERY")
    rank.add_argument("documents", metavar="DOCUMENT", nargs="*")
    rank.add_argument("--file", metavar="FILE", help="read more documents, one a line; - is standard input")
    rank.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_shared(rank)


def _add_batch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    batch = commands.add_parser(
        "batch",
        help="rerank every row of a JSON Lines file, resumably",
        description=_BATCH_ABOUT,
        formatter_class=_FORMAT,
        allow_abbrev=False,
    )
    batch.add_argument("input", metavar="INPUT", type=Path)
    batch.add_argument("output", metavar="OUTPUT", type=Path)
    batch.add_argument("--overwrite", action="store_true", help="start anew instead of resuming")
    batch.add_argument("--concurrency", type=int, default=8, metavar="N", help="rows in flight (default: %(default)s)")
    batch.add_argument(
        "--stop-after",
        type=int,
        default=20,
        metavar="N",
        help="stop when the server fails this many rows in a row (default: %(default)s)",
    )
    _add_shared(batch)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top-n", type=int, metavar="N", help="return only the best N")
    parser.add_argument("--normalize", action="store_true", help="return sigmoids of the raw logits")
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC (default: %(default)s)")
    server.add_argument("--model", default="light_reranker", help="the served reranker (default: %(default)s)")
    server.add_argument("--model-version", metavar="N", help="the version to ask (default: the server's choice)")
    server.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="SECONDS", help="limit of one query (default: %(default)s)"
    )
    server.add_argument(
        "--header", type=_header, action="append", default=[], metavar="K=V", help="metadata to send; may be repeated"
    )
    server.add_argument("--tls", action="store_true", help="encrypt, trusting the usual authorities")
    server.add_argument("--tls-ca", type=Path, metavar="FILE", help="encrypt, trusting the authority in this PEM file")
    server.add_argument("--tls-key", type=Path, metavar="FILE", help="private key for mutual TLS")
    server.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain for mutual TLS")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        # argparse would repeat the text, which may be a secret; it hides what ArgumentTypeError does not say.
        raise argparse.ArgumentTypeError("a header must be written K=V")
    return name, value


def _tls(arguments: argparse.Namespace) -> Tls | None:
    files = (arguments.tls_ca, arguments.tls_key, arguments.tls_cert)
    return Tls(*files) if arguments.tls or any(files) else None


def _file_lines(name: str | None) -> list[str]:
    if name is None:
        return []
    if name == "-":
        return [line.rstrip("\r\n") for line in sys.stdin]
    with Path(name).open(encoding="utf-8") as lines:
        return [line.rstrip("\r\n") for line in lines]
