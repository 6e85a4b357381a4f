# SPDX-License-Identifier: Apache-2.0
"""Every way a build can refuse.

BuildError                 what was given, what is allowed, what to do next; the command line prints it in one piece
├─ TableError              rerankers.toml is wrong
├─ CheckpointError         the checkpoint cannot be had, or is not a reranker this project can serve faithfully
├─ PairsError              a file of query/document pairs cannot be read or is too small
├─ ExportError             the exported graph is not the model
├─ EngineError             TensorRT refuses the graph, is missing, or has no GPU to build for
├─ GateError               a candidate would rank or score differently from the reference
├─ InstallError            the repository cannot take the version, or a file is not what its manifest says
└─ ServerError             tritonserver is missing, did not start, or died
"""

from __future__ import annotations


class BuildError(Exception):
    """A build step refuses to go on."""


class TableError(BuildError):
    """rerankers.toml is wrong."""


class CheckpointError(BuildError):
    """The checkpoint cannot be had, or cannot be served faithfully."""


class PairsError(BuildError):
    """A file of query/document pairs cannot be read or is too small."""


class ExportError(BuildError):
    """The exported graph is not the model."""


class EngineError(BuildError):
    """TensorRT refuses the graph, is missing, or has no GPU to build for; or a plan does not fit this machine."""


class GateError(BuildError):
    """A candidate would rank or score differently from the reference."""


class InstallError(BuildError):
    """The repository cannot take the version, or a file is not what its manifest says."""


class ServerError(BuildError):
    """No tritonserver can be started here, or one has failed; the message says why and what to do."""
