# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines`: build rerankers, install them as versions, and serve them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.markup import escape

from build_engines.build import build
from build_engines.configs import pinned_version, write_configs
from build_engines.demo import run_demo
from build_engines.errors import BuildError, EngineError, TableError
from build_engines.evaluate import add_evaluate_arguments, evaluate
from build_engines.install import installed_versions, pin, read_manifest
from build_engines.pairs import SAMPLE
from build_engines.places import REPOSITORY
from build_engines.plan_check import target_of
from build_engines.readme import README, with_rerankers
from build_engines.request import BuildRequest
from build_engines.serve import add_serve_arguments, serve
from build_engines.table import DEFAULT_TABLE, BasePrecision, Precision, find_reranker, read_table

_EXAMPLES = """examples:
  python -m build_engines build light_reranker                  the embedded model, ready to serve in a minute
  python -m build_engines build bge_reranker --checkpoint DIR   a BGE checkpoint from a folder
  python -m build_engines build bge_reranker --pairs LOG.jsonl  verified on your own queries
  python -m build_engines build bge_reranker --target gpu --pairs LOG.jsonl     INT8 TensorRT, calibrated on them too
  python -m build_engines build deepseek_reranker --instruction "Given a legal question, find the statutes"
  python -m build_engines serve                                 every reranker that is built, on 127.0.0.1
  python -m build_engines evaluate bge_reranker --pairs LOG.jsonl     does it rank your data better than your search?
  python -m build_engines list                                  what is built, and which version serves
"""


# Exit status of a gpu build that ends at the verified graph, for want of a GPU or of TensorRT.
NOT_FINISHED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 after a BuildError whose message is printed, or NOT_FINISHED."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(highlight=False, soft_wrap=True)
    try:
        status: int = arguments.run(arguments, console)
    except BuildError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[bold red]refused[/bold red] {escape(str(error))}"
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m build_engines",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("build", help="checkpoint -> graph -> INT8 -> verified -> installed version")
    _add_build_arguments(command)
    _add_places(command)
    command.set_defaults(run=_build)

    command = commands.add_parser("serve", help="run tritonserver on what is built")
    add_serve_arguments(command)
    _add_places(command)
    command.set_defaults(run=serve)

    command = commands.add_parser("evaluate", help="does a reranker rank your data better than the order you have?")
    add_evaluate_arguments(command)
    _add_places(command)
    command.set_defaults(run=evaluate)

    command = commands.add_parser("list", help="show rerankers and their installed versions")
    _add_places(command)
    command.set_defaults(run=_list)

    command = commands.add_parser("pin", help="choose the installed version that a reranker serves")
    command.add_argument("name")
    command.add_argument("version", type=int)
    _add_places(command)
    command.set_defaults(run=_pin)

    command = commands.add_parser("configs", help="write the config.pbtxt files from the table")
    _add_places(command)
    command.set_defaults(run=_configs)

    command = commands.add_parser("readme", help="write the README's table of rerankers")
    command.set_defaults(run=_readme)

    command = commands.add_parser("demo", help="serve light_reranker and rank a small sample")
    _add_places(command)
    command.set_defaults(run=run_demo)
    return parser


def _add_build_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", help="a row of the table of rerankers")
    command.add_argument(
        "--target",
        choices=["cpu", "gpu", "onnx"],
        default="cpu",
        help="cpu: ONNX Runtime; gpu: a TensorRT engine; onnx stops at the FP32 graph (default: cpu)",
    )
    command.add_argument(
        "--checkpoint", help="use this folder or hub id instead of the row's (hub ids need --revision)"
    )
    command.add_argument("--revision", help="commit of a hub checkpoint, 40 hexadecimal digits")
    command.add_argument("--precision", choices=get_args(Precision), help="instead of the row's")
    command.add_argument("--instruction", help="decoders: what the prompt asks for, instead of the row's")
    command.add_argument(
        "--pairs",
        type=Path,
        default=SAMPLE,
        help="JSONL of query, documents(, relevance) to verify on; for gpu, a quarter of its queries calibrates",
    )
    command.add_argument("--calibration", type=Path, help="JSONL to calibrate on instead; no query of --pairs is used")
    command.add_argument(
        "--engine-only", action="store_true", help="finish a gpu build whose verified graph is there; needs no PyTorch"
    )
    command.add_argument("--build-folder", type=Path, default=Path("build"), help="intermediate files (default: build)")


def _add_places(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--repository", type=Path, default=REPOSITORY, help="model repository (default: the checkout's)"
    )
    command.add_argument(
        "--table", type=Path, default=DEFAULT_TABLE, help="table of rerankers (default: rerankers.toml)"
    )


def _build(arguments: argparse.Namespace, console: Console) -> int:
    reranker = find_reranker(arguments.name, arguments.table)
    if arguments.checkpoint:
        # The row's hashes and revision belong to the row's checkpoint.
        reranker = dataclasses.replace(
            reranker, checkpoint=arguments.checkpoint, revision=arguments.revision or "", sha256={}
        )
    if arguments.instruction is not None:
        if reranker.prompt is None:
            raise TableError(f"{reranker.name} has no prompt, so an instruction has no place; leave --instruction out.")
        reranker = dataclasses.replace(reranker, prompt=reranker.prompt.instructed(arguments.instruction))
    if arguments.precision:
        changed = {"precision": arguments.precision}
        if arguments.target == "gpu" and arguments.precision in get_args(BasePrecision):
            changed["base_precision"] = arguments.precision
        reranker = dataclasses.replace(reranker, **changed)
    request = BuildRequest(
        reranker,
        arguments.target,
        arguments.repository,
        arguments.build_folder,
        arguments.pairs,
        arguments.calibration,
        arguments.table,
    )
    if arguments.engine_only:
        if arguments.target != "gpu":
            raise EngineError("--engine-only finishes a gpu build; give --target gpu as well.")
        from build_engines.finish import finish  # noqa: PLC0415 - ONNX and its runtime, which other commands do not need

        finish(request, console, engine_only=True)
        return 0
    built = build(request, console)
    return NOT_FINISHED if arguments.target == "gpu" and isinstance(built, Path) else 0


def _list(arguments: argparse.Namespace, console: Console) -> int:
    for name, reranker in read_table(arguments.table).items():
        live = pinned_version(arguments.repository, reranker)
        versions = installed_versions(arguments.repository, reranker)
        console.print(f"[bold]{name}[/bold]  {escape(reranker.about)}")
        for version in versions:
            manifest = read_manifest(arguments.repository, reranker, version)
            mark = "serves" if version == live else "      "
            source = manifest["checkpoint"]["source"]
            built = f"{target_of(manifest)}  {manifest['precision']}"
            asked = escape(f"  {manifest['prompt']['instruction']!r}") if "prompt" in manifest else ""
            console.print(f"  {mark} {version}  {built}  {source}  {manifest['built_at']}{asked}")
        if not versions:
            console.print(f"  not built: python -m build_engines build {name}")
    return 0


def _pin(arguments: argparse.Namespace, console: Console) -> int:
    reranker = find_reranker(arguments.name, arguments.table)
    pin(arguments.repository, reranker, arguments.version)
    console.print(
        f"{arguments.name} serves version {arguments.version}; a running server sees it when it loads the model again."
    )
    return 0


def _configs(arguments: argparse.Namespace, console: Console) -> int:
    for reranker in read_table(arguments.table).values():
        for path in write_configs(arguments.repository, reranker, pinned_version(arguments.repository, reranker)):
            console.print(f"wrote {path}")
    return 0


def _readme(_arguments: argparse.Namespace, console: Console) -> int:
    README.write_text(with_rerankers(README.read_text(encoding="utf-8"), read_table()), encoding="utf-8")
    console.print(f"wrote {README}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
