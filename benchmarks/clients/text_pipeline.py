"""Transformers' pipeline: one prompt at a time, several rows, and sampled with a seed."""

import json
import sys
from pathlib import Path

from transformers import pipeline, set_seed

model, prompts, output = sys.argv[1:]
texts = json.loads(Path(prompts).read_text())
pipe = pipeline("text-generation", model=model)
answers = [pipe(text, max_new_tokens=48, do_sample=False) for text in texts]
answers += pipe(texts, max_new_tokens=48, do_sample=False, batch_size=3)
set_seed(1)
answers.append(pipe(texts[0], max_new_tokens=48, do_sample=True, temperature=0.5))
Path(output).write_text(json.dumps(answers))
