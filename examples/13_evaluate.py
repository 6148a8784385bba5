"""Compare files of one model: how far each is from its source, what it weighs, how fast it is; and where it lost it."""

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import kvarn

with tempfile.TemporaryDirectory() as folder:
    held_out = Path(folder, "held-out.txt")
    held_out.write_text("\n".join(topics[page] for page in sorted(topics)[1::2]), encoding="utf-8")
    options = kvarn.EvaluationOptions(chunks=2, context=128)

    for type in ("Q8_0", "Q4_0"):
        small = Path(folder, f"{type}.gguf")
        report = kvarn.quantize("smollm2", type, small, options=kvarn.QuantizeOptions(requantize=True))
        found = kvarn.evaluate(small, text=held_out, against="smollm2", options=options)
        assert found.divergence is not None
        print(
            f"{type}: {found.num_bytes / 1e6:.1f} MB, perplexity {found.perplexity:.2f}, mean KL "
            f"{found.divergence.kl_mean:.4f}, top-1 {found.divergence.top1:.1%}; {len(report.requantized)} tensors "
            "rounded a second time"
        )
