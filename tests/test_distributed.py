"""Targets that two processes run together: by tensor parallelism and by FSDP."""

import subprocess
import sys
from pathlib import Path


def test_two_processes(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + ["--module", "helpers.distributed_worker", tmp_path],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
