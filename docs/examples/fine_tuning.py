"""Fine-tune a small vision transformer with a schedule by transformers' Trainer, and draw its bits, loss and cost.

The network is pre-trained here, in float, on the handwritten digits 0 to 4 of scikit-learn, and fine-tuned on 5 to 9.
Usage: python fine_tuning.py [STEPS [PICTURE]]
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from bitcycle.integrations.transformers import PrecisionCallback


def samples(first: int) -> list[dict[str, object]]:
    """Images of five digits, from `first` on: pixels [1, 8, 8] in [-1, 1] and a label from 0 to 4."""
    images, digits = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return [{"pixel_values": x, "labels": int(y) - first} for x, y in zip(pixels, digits) if first <= y < first + 5]


def train(model: torch.nn.Module, first: int, steps: int, callbacks: list[PrecisionCallback]) -> list[dict[str, float]]:
    """The log of training on five digits, which ends with the accuracy on 200 test images."""
    options = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    options |= {"max_steps": steps, "per_device_train_batch_size": 32, "learning_rate": 1e-3}
    trainer = Trainer(
        model,
        TrainingArguments("trainer", **options),
        train_dataset=samples(first)[200:],
        eval_dataset=samples(first)[:200],
        callbacks=callbacks,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


def main(steps: int = 300, picture: str = "fine_tuning.png") -> list[dict[str, float]]:
    """Pre-train, fine-tune and draw; returns the log of fine-tuning."""
    set_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=5, **size))
    train(model, 0, steps, [])
    log = train(model, 5, steps, [PrecisionCallback("CR", q_min=3, q_max=8, cycles=4, evaluate_at="q_max")])
    logged = [entry for entry in log if "loss" in entry]
    figure, axes = plt.subplots(3, sharex=True, figsize=(6, 6), layout="constrained")
    for axis, key, label in zip(axes, ("bits_weight", "loss", "gbitops"), ("bits", "training loss", "cost in GBitOps")):
        axis.plot([entry["step"] for entry in logged], [entry[key] for entry in logged])
        axis.set_ylabel(label)
    accuracy, cost = 100 * log[-1]["eval_accuracy"], 100 * logged[-1]["cost_relative_to_static"]
    axes[2].set_xlabel("step")
    axes[0].set_title(f"test accuracy {accuracy:.1f} %, cost {cost:.0f} % of static 8 bits")
    figure.savefig(picture)
    return log


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
