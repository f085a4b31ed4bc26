"""Options of training: length, optimizer, evaluation, and settings without effect on results (devices, logging)."""

import re
from dataclasses import dataclass
from typing import Optional

from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.recipe.optimizer import OptimizerOptions
from bitcycle.recipe.weight_averaging import WeightAveragingOptions
from bitcycle.settings import SettingError, Settings, setting


@dataclass
class TrainingOptions(Settings):
    """Options of the training loop."""

    steps: Optional[int] = setting(64_000, "length of the run in optimizer steps; or set epochs", minimum=1)
    epochs: Optional[float] = setting(
        None, "length of the run in passes over the training data; or set steps", minimum=0
    )
    batch_size: int = setting(128, "training samples per step", minimum=1)
    optimizer: OptimizerOptions = setting(OptimizerOptions, "the optimizer")
    learning_rate: LearningRateOptions = setting(LearningRateOptions, "the learning rate as a function of the step")
    clip_norm: Optional[float] = setting(
        None, "clip the Euclidean norm of the gradient of all parameters to this; null: no clipping", minimum=0
    )
    weight_averaging: WeightAveragingOptions = setting(WeightAveragingOptions, "averaging of the weights")
    evaluation_steps: Optional[int] = setting(
        390, "evaluation interval in steps (released code: 390); null: after each epoch; always at the end", minimum=1
    )
    evaluation_precision: str = setting(
        "last",
        "bits in evaluations: last (those of the last training step, as the released code), max (q_max) or float;"
        " accuracy at q_max is always logged too",
        choices=("last", "max", "float"),
    )
    compute: str = setting(
        "simulate",
        "simulate: products of quantized float32 tensors; codes: of their integer codes where these have up to 8 bits (sbm),"
        " exact, in less memory, and different in the rounding of float32 sums only",
        choices=("simulate", "codes"),
    )
    recompute: bool = setting(
        False,
        "with compute=codes, compute the inputs of batch norms again for the backward pass instead of keeping them: the same"
        " numbers in about half of the memory, in more time",
        affects_result=False,
    )
    compile: str = setting(
        "auto",
        "fuse quantizers with torch.compile, with the same numbers: true, false, or auto (where it saves time)",
        choices=("auto", "true", "false"),
        affects_result=False,
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, mps, or auto (cuda if available)", affects_result=False)
    threads: Optional[int] = setting(None, "CPU threads; null: PyTorch's choice", minimum=1, affects_result=False)
    deterministic: bool = setting(
        True, "use deterministic algorithms, which exact resuming needs on a GPU", affects_result=False
    )
    checkpoint_seconds: float = setting(
        60.0, "save a checkpoint when the last is older than this", minimum=0, affects_result=False
    )
    log_steps: int = setting(
        50, "interval in steps at which the mean training loss is logged", minimum=1, affects_result=False
    )

    def validate(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            problem = f"the length of the run is given {'twice, also by epochs' if self.steps else 'neither here nor by epochs'}"
            raise SettingError(
                "steps", self.steps, problem, "set one of training.steps and training.epochs to null, not both"
            )
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise SettingError("device", self.device, "is not a device", "use auto, cpu, cuda, cuda:NUMBER or mps")
        if self.recompute and self.compute != "codes":
            remedy = "set training.compute=codes, or training.recompute=false"
            raise SettingError("recompute", True, "has no codes to compute from", remedy)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in optimizer steps, given the steps per epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))


@dataclass
class LoggingOptions(Settings):
    """Destinations of metrics besides metrics.jsonl, which is always written."""

    wandb: str = setting(
        "disabled",
        "Weights & Biases: disabled, offline (sync later) or online",
        choices=("disabled", "offline", "online"),
    )
    wandb_project: str = setting("bitcycle", "project name at Weights & Biases")
    wandb_entity: Optional[str] = setting(None, "team or user at Weights & Biases; null: that of the login")
    group: str = setting("", "group of the run at Weights & Biases; a sweep file sets its own name, as cpt/table2")
    tags: list[str] = setting([], "tags at Weights & Biases besides paper, scale and quantizer")
    objective: list[str] = setting(
        ["final"],
        "value that a run returns to an optimizing sweeper such as Optuna; a list for several objectives",
        choices=("final", "best", "mean_of_last", "validation", "gbitops", "relative_to_static"),
    )
    tensorboard: bool = setting(False, "write TensorBoard event files into the run folder")
    picture: bool = setting(False, "plot precision, accuracy and loss over the steps, as picture.png in the run folder")
    progress: bool = setting(True, "show a progress bar if the output is a terminal")
