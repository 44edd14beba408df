"""bitsandbytes: weights in four bits."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

folder, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float32,
    llm_int8_skip_modules=["in_proj_a", "in_proj_b", "lm_head"],  # of four columns, which its CPU kernel cannot pack
)
model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
answers = []
for text in json.loads(Path(prompts).read_text()):
    inputs = tokenizer(text, return_tensors="pt")
    answers.append(model.generate(**inputs, max_new_tokens=48, do_sample=False)[0].tolist())
Path(output).write_text(json.dumps(answers))
