"""torchao: weights in eight bits, activations as they were."""

import json
import sys
from pathlib import Path

from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

folder, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
answers = []
for text in json.loads(Path(prompts).read_text()):
    inputs = tokenizer(text, return_tensors="pt")
    answers.append(model.generate(**inputs, max_new_tokens=48, do_sample=False)[0].tolist())
Path(output).write_text(json.dumps(answers))
