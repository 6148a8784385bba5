"""Make a smaller file of a model and measure what that costs; a float source would need no requantize."""

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import kvarn

with tempfile.TemporaryDirectory() as folder:
    calibration, held_out = Path(folder, "calibration.txt"), Path(folder, "held-out.txt")
    pages = sorted(topics)
    calibration.write_text("\n".join(topics[page] for page in pages[::2]), encoding="utf-8")
    held_out.write_text("\n".join(topics[page] for page in pages[1::2]), encoding="utf-8")

    matrix, small = Path(folder, "model.imatrix"), Path(folder, "small.gguf")
    kvarn.collect_imatrix("smollm2", matrix, text=calibration, options=kvarn.ImatrixOptions(chunks=4, context=128))
    report = kvarn.quantize("smollm2", "IQ4_NL", small, options=kvarn.QuantizeOptions(imatrix=matrix, requantize=True))
    print(f"{report.source_bytes / 1e6:.1f} MB -> {report.num_bytes / 1e6:.1f} MB, {report.types()}")

    options = kvarn.EvaluationOptions(chunks=2, context=128)
    found = kvarn.evaluate(small, text=held_out, against="smollm2", options=options)
    if found.divergence is not None:
        print(f"perplexity {found.perplexity:.2f}, mean KL {found.divergence.kl_mean:.4f}")
