"""Answer on LoRA adapters: two and the base in one batch. The adapters are made up here; PEFT saves real ones."""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import kvarn


def write_adapter(folder: Path, width: int, seed: int) -> Path:
    """A PEFT folder that changes what the first layer's attention writes."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng, module = np.random.default_rng(seed), "base_model.model.model.layers.0.self_attn.o_proj"
    pair = {f"{module}.lora_A.weight": (4, width), f"{module}.lora_B.weight": (width, 4)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


with kvarn.LLM("smollm2") as llm, tempfile.TemporaryDirectory() as folder:
    for seed, name in enumerate(("red", "blue")):
        lora = llm.load_lora(write_adapter(Path(folder, name), llm.spec.width, seed))
        print(f"{lora.name}: rank {lora.ranks[0]}, {', '.join(lora.targets)}, {lora.num_bytes:,} bytes")
    params = kvarn.SamplingParams(max_tokens=12, temperature=0.0)
    for answer in llm.generate(["The sky is"] * 3, params, lora=["red", "blue", None]):
        print(answer.text)
