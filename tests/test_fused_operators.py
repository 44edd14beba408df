"""Operators that are one kernel each: what they give, by Triton's interpreter, and that no wrong one is used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_ddtree.attention import fused

WORKER = Path(__file__).parent / "helpers" / "fused_worker.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed; PyTorch's builds for CPUs lack it")
def test_kernels_by_the_interpreter():
    """Against the recurrence node by node, the operators of PyTorch, and plain forwards of whole models."""
    ran = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == ["the gated delta rule is right", "the convolution is right", "models are right"]


@pytest.fixture
def no_verdicts(monkeypatch):
    monkeypatch.setattr(fused, "_is_right", {})


@pytest.mark.core
def test_a_kernel_is_compared_once_and_then_used(no_verdicts):
    calls = []

    def give(name, value):
        calls.append(name)
        return (torch.full((3,), value),)

    for _ in range(3):
        output = fused.checked("form", lambda: give("fused", 1.00001), lambda: give("plain", 1.0))
    assert calls == ["plain", "fused", "fused", "fused"] and fused.verdicts() == {"form": True}
    assert output[0][0] != 1.0


@pytest.mark.core
@pytest.mark.parametrize("wrong", ["values", "NaN", "an error"])
def test_a_kernel_that_is_wrong_is_not_used(wrong, no_verdicts, caplog):
    def give():
        if wrong == "an error":
            raise RuntimeError("out of resource: shared memory")
        return torch.ones(3), torch.tensor([1.0, 1.01 if wrong == "values" else float("nan")])

    caplog.set_level(logging.WARNING)
    logging.getLogger("transformers").propagate = True
    for _ in range(2):
        output = fused.checked("form", give, lambda: (torch.ones(3), torch.ones(2)))
        assert torch.equal(output[1], torch.ones(2))
    assert fused.verdicts() == {"form": False}
    [record] = [record for record in caplog.records if "is not used" in record.message]
    assert "PyTorch's operations" in record.message


@pytest.mark.core
def test_nothing_is_said_of_a_kernel_where_the_result_is_not_finite(no_verdicts):
    expected = (torch.tensor([float("nan")]),)
    assert fused.checked("form", lambda: (torch.zeros(1),), lambda: expected)[0] is expected[0]
    assert fused.verdicts() == {}


@pytest.mark.core
def test_kernels_are_for_cuda_alone():
    assert not fused.can_run(torch.device("cpu")) and not fused.can_run(torch.device("meta"))
