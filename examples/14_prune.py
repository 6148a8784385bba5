"""Leave out what a model needs least, measured on a text, and judge the result by another text."""

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import kvarn

with tempfile.TemporaryDirectory() as folder:
    calibration, held_out = Path(folder, "calibration.txt"), Path(folder, "held-out.txt")
    pages = sorted(topics)
    calibration.write_text("\n".join(topics[page] for page in pages[::2]), encoding="utf-8")
    held_out.write_text("\n".join(topics[page] for page in pages[1::2]), encoding="utf-8")

    small, options = Path(folder, "small.gguf"), kvarn.PruneOptions(text=calibration)
    report = kvarn.prune("smollm2", kvarn.PruneTarget(layers=2), small, options=options)
    print(f"{report.kept:.1%} of the weights of all layers; layers {report.removed_layers} went")

    judged = kvarn.EvaluationOptions(chunks=2, context=128)
    found = kvarn.evaluate(small, text=held_out, against="smollm2", options=judged)
    if found.divergence is not None:
        print(f"perplexity {found.perplexity:.2f}, mean KL {found.divergence.kl_mean:.4f}")
