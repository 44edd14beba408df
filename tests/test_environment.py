"""`hf-ddtree doctor`: what it says of environments that are slow or do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

from hf_ddtree import environment
from hf_ddtree.attention import fused
from hf_ddtree.cli import app
from hf_ddtree.environment import Finding, examine, versions


def advice() -> dict[str, str]:
    return {finding.subject: finding.advice for finding in examine() if finding.advice}


def test_versions_are_those_that_are_imported():
    assert Version(str(versions()["torch"])) == Version(torch.__version__)
    assert list(versions()) == ["python", *environment.PACKAGES]


def test_json_is_what_was_found():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert [Finding(**entry) for entry in json.loads(result.stdout)] == examine()


def test_says_that_nothing_is_slow(monkeypatch):
    monkeypatch.setattr(environment, "examine", lambda: [Finding("device", "CPU")])
    assert "Nothing to mend." in CliRunner().invoke(app, ["doctor"]).stdout
    monkeypatch.setattr(environment, "examine", lambda: [Finding("device", "CPU", "Buy [another].")])
    result = CliRunner().invoke(app, ["doctor"])
    assert "Buy [another]." in result.stdout and "Nothing" not in result.stdout


@pytest.mark.parametrize("threads, is_slow", [(1, True), (4, False), (8, False)])
def test_idle_cores(threads, is_slow, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert ("threads" in advice()) == is_slow
    assert not is_slow or "OMP_NUM_THREADS is set" in advice()["threads"]


@pytest.mark.parametrize(
    "built_for, expected", [(None, "built for the CPU"), ("12.8", "CUDA 12.8 cannot use the GPU")]
)
def test_a_gpu_that_is_not_used(built_for, expected, monkeypatch, tmp_path):
    (tmp_path / "version").touch()
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert expected in advice()["device"]


@pytest.mark.parametrize("capability, is_slow", [("AVX2", True), ("AVX512", False)])
def test_half_precision_on_a_processor_without_it(capability, is_slow, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert ("instructions" in advice()) == is_slow


@pytest.mark.parametrize("is_there", [True, False])
def test_kernels_on_a_gpu(is_there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: is_there)
    monkeypatch.setattr(fused, "has_triton", lambda: is_there)
    found = versions() | dict.fromkeys(("flash-linear-attention", "causal-conv1d"), "1" if is_there else None)
    monkeypatch.setattr(environment, "versions", lambda: found)
    assert {finding.subject: finding.found for finding in examine()}["device"] == "GPU 0, GPU 1"
    kernels = {"attention", "recurrent layers", "recurrent layers over a tree"}
    assert advice().keys() & kernels == (set() if is_there else kernels)
    assert is_there or advice()["recurrent layers"].endswith("pip install flash-linear-attention causal-conv1d")


def test_versions_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(environment, "versions", lambda: versions() | {"transformers": "4.57.0"})
    monkeypatch.setattr(environment.metadata, "requires", lambda name: ["transformers<6,>=5.17", "torch>=2.6"])
    assert advice()["transformers"].endswith("pip install 'transformers<6,>=5.17'")
    assert "torch" not in advice()
