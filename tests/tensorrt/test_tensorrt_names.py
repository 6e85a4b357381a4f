# SPDX-License-Identifier: Apache-2.0
"""Every name that the build takes from TensorRT exists in both majors: its code is read, the real bindings asked."""

from __future__ import annotations

import ast
import inspect
import json

import pytest

from build_engines import engine
from tests.tensorrt.without_gpu import MAJORS, TensorRT

# The variables of engine.py that hold something of TensorRT's, and its class there.
CLASSES = {
    "builder": "Builder",
    "cache": "ITimingCache",
    "config": "IBuilderConfig",
    "error": "ParserError",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "plan": "IHostMemory",
    "profile": "IOptimizationProfile",
    "tensor": "ITensor",
}
# The variables that hold something else, beside what the module itself has and parameters with a type.
OTHERS = {"entry", "model", "reasons", "said", "self", "temporary", "weight"}

FIND_MISSING = """
import json, sys, tensorrt
def has(path):
    found = tensorrt
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
print(json.dumps([path for path in json.loads(sys.argv[1]) if not has(path)]))
"""


def used_names() -> set[str]:
    """Return `Class.attribute`, `Enumeration.MEMBER` and functions: all that engine.py takes from TensorRT."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(engine))))
    typed = {node.arg for node in nodes if isinstance(node, ast.arg) and _annotation(node) not in ("", "Any")}
    names = set()
    for node in nodes:
        path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        variable, *attributes = path.split(".")
        if variable == "trt":
            names.add(".".join(attributes))
        elif variable in CLASSES:
            names.add(f"{CLASSES[variable]}.{attributes[0]}")
        elif variable.isidentifier():
            known = variable in OTHERS | typed or hasattr(engine, variable)
            assert known, f"engine.py uses {path}: is {variable} of TensorRT's? Say so above, in CLASSES or in OTHERS."
    return names


def _annotation(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else ""


def test_the_code_is_read_rightly() -> None:
    assert {
        "Builder.build_serialized_network",
        "BuilderFlag.VERSION_COMPATIBLE",
        "ILogger.VERBOSE",
        "IOptimizationProfile.set_shape",
        "ITensor.shape",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "OnnxParser.parse_from_file",
        "ParserError.node_name",
    } <= used_names()
    assert len(used_names()) > 35


@pytest.mark.parametrize("major", MAJORS)
def test_every_name_that_the_build_uses_is_there(tensorrt: TensorRT, major: str) -> None:
    assert json.loads(tensorrt.python("-c", FIND_MISSING, json.dumps(sorted(used_names())), major=major)) == []


def test_what_11_has_removed_is_found_missing(tensorrt: TensorRT) -> None:
    removed = json.dumps(
        ["BuilderFlag.FP16", "NetworkDefinitionCreationFlag.EXPLICIT_BATCH", "IBuilderConfig.set_flag"]
    )
    assert json.loads(tensorrt.python("-c", FIND_MISSING, removed, major="11")) == json.loads(removed)[:2]
    assert json.loads(tensorrt.python("-c", FIND_MISSING, removed, major="10")) == []


def test_the_version_is_read_from_the_library_itself(tensorrt: TensorRT) -> None:
    code = "from build_engines.gpu import installed_tensorrt; print(installed_tensorrt())"
    # TensorRT-RTX counts its own versions, and composes the number as TensorRT does.
    assert tensorrt.python("-c", code).strip() == "1.7.1"
