# SPDX-License-Identifier: Apache-2.0
"""Small Python-backend models, good and bad, for tests of the server itself; and how to ask them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray

from build_engines.triton_server import TritonServer

CONFIG = """
name: "{name}"
backend: "python"
input [{{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }}]
output [{{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}]
instance_group [{{ kind: KIND_CPU }}]
parameters {{ key: "factor" value {{ string_value: "{factor}" }} }}
"""
ENSEMBLE = """
name: "echo_ensemble"
platform: "ensemble"
input [{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }]
ensemble_scheduling { step [{
  model_name: "echo" model_version: 1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
}] }
"""
MODEL = """
import json, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])
        {initialize}

    def execute(self, requests):
        {execute}
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", (x * self.factor).astype(x.dtype))]))
        return answers
"""


def write_repository(repository: Path) -> None:
    """One model for each way to behave, and an ensemble over the one that behaves well."""
    write_model(repository, "echo")
    configs = repository / "echo" / "configs"
    configs.mkdir()
    (configs / "cpu.pbtxt").write_text(CONFIG.format(name="echo", factor=10))
    (repository / "echo_ensemble" / "1").mkdir(parents=True)
    (repository / "echo_ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    write_model(repository, "bystander")
    write_model(repository, "broken", initialize='raise RuntimeError("the weights are upside down")')
    write_model(repository, "slow", initialize="time.sleep(60)")
    write_model(repository, "crashing", execute="os._exit(3)")


def write_model(repository: Path, name: str, initialize: str = "pass", execute: str = "pass") -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, factor=1))
    (version / "model.py").write_text(MODEL.format(initialize=initialize, execute=execute))


def infer(server: TritonServer, model: str, values: list[float]) -> list[float]:
    tensor = triton.InferInput("X", [len(values)], "FP32")
    tensor.set_data_from_numpy(np.array(values, dtype=np.float32))
    with triton.InferenceServerClient(server.grpc_url) as client:
        result: NDArray[np.float32] = client.infer(model, [tensor], client_timeout=20).as_numpy("Y")
    return [float(value) for value in result]


def loaded_models(server: TritonServer) -> set[str]:
    with triton.InferenceServerClient(server.grpc_url) as client:
        index = client.get_model_repository_index(as_json=True)
    return {model["name"] for model in index["models"] if model.get("state") == "READY"}
