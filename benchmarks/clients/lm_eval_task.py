"""lm-evaluation-harness: its command line, on a task that generates until a stop string."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
task: completions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{prompt}}}}"
generation_kwargs: {{max_gen_toks: 48, do_sample: false, until: ["\\n\\n\\n\\n", "import"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
model, prompts, output = sys.argv[1:]
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in json.loads(Path(prompts).read_text())))
    (folder / "completions.yaml").write_text(TASK.format(data=data))
    command = [str(Path(sys.executable).parent / "lm_eval"), "--model", "hf", "--tasks", "completions"]
    command += ["--model_args", f"pretrained={model},dtype=float32", "--device", "cpu", "--batch_size", "2"]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(folder / "results")]
    subprocess.run(command, check=True)
    (samples,) = (folder / "results").rglob("samples_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
Path(output).write_text(json.dumps([answer["resps"] for answer in sorted(answers, key=lambda each: each["doc_id"])]))
