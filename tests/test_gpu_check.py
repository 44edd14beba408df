"""The script that is run by hand on a GPU, on the CPU and with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def test_the_check_runs_on_the_cpu(tmp_path):
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--quick", "--output", tmp_path / "report.json"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["families"]) == 22 and all(row["passed"] for row in report["families"])
    assert all(row["noise"] > 0 and row["tokens_per_forward"] > 1.2 for row in report["families"])
    assert len(report["tree_search"]) == 8 and all(row["equal"] for row in report["tree_search"])
    ran = {row["attention"] for row in report["attention"] if row["error"] is not None}
    assert {"sdpa", "eager"} <= ran and "triton" in report["kernels"]
    for rows in report["speed"].values():
        assert [row["method"] for row in rows] == ["plain", "chain", "tree 16", "tree 32", "tree 64"]
        assert all(row["tokens_per_second"] > 0 and row["identical"] == rows[0]["identical"] for row in rows)
        assert rows[-1]["tokens_per_forward"] >= rows[1]["tokens_per_forward"] > 1.5
    assert len(report["rounds"]) == 2
