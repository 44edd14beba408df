"""Rollouts of a policy that is trained, with a drafter that goes on learning and with one that stays as it is.

    pip install trl '.[train]'
    python benchmarks/rollouts.py

Runs `examples/rollouts.py` with the same seeds both ways, and counts the policy's forwards per rollout. A third way is
standard decoding, which takes one forward per token.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from measure import RESULTS, save
from rich.progress import track

from hf_ddtree.demo import demo_folders

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from rollouts import train


def main(
    steps: Annotated[int, typer.Option(help="Steps of the policy.")] = 24,
    every: Annotated[int, typer.Option(help="Steps from one refreshment of the drafter to the next.")] = 6,
    new_tokens: Annotated[int, typer.Option(help="Tokens per rollout.")] = 64,
    seeds: Annotated[int, typer.Option(help="Runs of each way.")] = 3,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "rollouts.json",
) -> None:
    ways = [(seed, refresh_every) for seed in range(seeds) for refresh_every in (every, 0)]
    runs = [
        {
            "seed": seed,
            "refresh_every": refresh_every,
            "forwards": train(*demo_folders(), steps, refresh_every, new_tokens, seed=seed),
        }
        for seed, refresh_every in track(ways, "training")
    ]
    ranges = [range(start, min(start + every, steps)) for start in range(0, steps, every)]

    def averages(refresh_every: int) -> list[float]:
        found = [run["forwards"] for run in runs if run["refresh_every"] == refresh_every]
        return [round(mean(forwards[step] for forwards in found for step in part), 1) for part in ranges]

    summary = {
        "steps": [f"{part[0] + 1} to {part[-1] + 1}" for part in ranges],
        "refreshed": averages(every),
        "as it was": averages(0),
    }
    print(summary)
    save(output, summary, runs, every=every, new_tokens=new_tokens, seeds=seeds)


if __name__ == "__main__":
    typer.run(main)
