"""Generate answers with a model split across the visible GPUs: python multi_gpu_inference.py."""

import torch
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct",
    max_seq_length=2048,
    dtype=None,
    load_in_4bit=True,
    device_map="auto",
    trust_remote_code=False,
)
FastLanguageModel.for_inference(model)
print(f"Devices: {getattr(model, 'hf_device_map', None) or next(model.parameters()).device}")
for prompt in ("What is the capital of France?", "How does machine learning work?"):
    text = f"### Instruction:\n{prompt}\n\n### Response:\n"
    inputs = tokenizer([text], return_tensors="pt", padding=True, truncation=True, max_length=2048)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        outputs = model.generate(**inputs, max_new_tokens=16, temperature=0.7, do_sample=True, top_p=0.9)
    print(f"Response: {tokenizer.decode(outputs[0], skip_special_tokens=True).partition('### Response:')[2].strip()}")
