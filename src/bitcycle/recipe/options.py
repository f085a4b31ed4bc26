"""Options of training: length, optimizer, evaluation, and settings that do not affect results (device, logging)."""

import re
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn

from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.recipe.weight_averaging import WeightAveragingOptions
from bitcycle.settings import SettingError, Settings, setting


@dataclass
class OptimizerOptions(Settings):
    """Options of the optimizer."""

    name: str = setting("sgd", "sgd, adam, or adamw (decoupled weight decay)", choices=("sgd", "adam", "adamw"))
    momentum: float = setting(0.9, "sgd: momentum", minimum=0, maximum=1, used_by=["sgd"])
    nesterov: bool = setting(False, "sgd: Nesterov momentum (partial pre-training)", used_by=["sgd"])
    weight_decay: float = setting(
        1e-4,
        "weight decay of all parameters, including batch norm (released code), excluding quantizers' (PACT's alpha)",
        minimum=0,
    )
    beta1: float = setting(0.9, "adam(w): decay of the first moment", minimum=0, maximum=1, used_by=["adam", "adamw"])
    beta2: float = setting(
        0.999, "adam(w): decay of the second moment", minimum=0, maximum=1, used_by=["adam", "adamw"]
    )
    epsilon: float = setting(1e-8, "adam(w): added to the denominator", minimum=0, used_by=["adam", "adamw"])

    def validate(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise SettingError("nesterov", True, "needs momentum above 0", "set momentum=0.9 or nesterov=false")
        for beta in ("beta1", "beta2"):
            if getattr(self, beta) == 1:
                raise SettingError(beta, 1, "never updates the average", "use a value below 1")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters; the learning rate is set at each step."""
        parameters = self._parameters(model)
        common: dict[str, Any] = {"weight_decay": self.weight_decay, "foreach": True}
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=0.0, momentum=self.momentum, nesterov=self.nesterov, **common)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(parameters, betas=(self.beta1, self.beta2), eps=self.epsilon, **common)

    def _parameters(self, model: nn.Module) -> list[Any]:
        """All trainable parameters; those of quantizers in a separate group without weight decay."""
        quantizers = [module for module in model.modules() if getattr(module, "is_quantizer", False)]
        undecayed = [parameter for module in quantizers for parameter in module.parameters(recurse=False)]
        ids = {id(parameter) for parameter in undecayed}
        decayed = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
        return [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}] if undecayed else decayed


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
        None, "maximum Euclidean norm of the gradient of all parameters (clipping); null: no clipping", minimum=0
    )
    weight_averaging: WeightAveragingOptions = setting(WeightAveragingOptions, "averaging of the weights")
    evaluation_steps: Optional[int] = setting(
        390, "evaluation interval in steps (released code: 390); null: after each epoch; always at the end", minimum=1
    )
    compute: str = setting(
        "simulate",
        "simulate: products of quantized float32 tensors; codes: products of integer codes of up to 8 bits (sbm),"
        " in less memory, different only in rounding: of float32 sums, and of weights to 16 bits for input gradients",
        choices=("simulate", "codes"),
    )
    recompute: bool = setting(
        False,
        "with compute=codes, recompute inputs of batch norms in the backward pass instead of storing them: same"
        " results, about half of the memory, slower",
        affects_result=False,
    )
    compile: str = setting(
        "auto",
        "fuse quantizers with torch.compile, with identical results: true, false, or auto (where it saves time)",
        choices=("auto", "true", "false"),
        affects_result=False,
    )
    device: str = setting(
        "auto",
        "cpu, cuda, cuda:1, xpu, mps, or auto (the accelerator that PyTorch sees, else cpu)",
        affects_result=False,
    )
    tf32: bool = setting(
        False,
        "round operands of float32 products to 11 bits on CUDA (TF32): faster, but quantized values are not exact there;"
        " nothing changes on other devices",
    )
    cuda_graphs: str = setting(
        "auto",
        "on CUDA, record steps of classification and recommendation once and replay them, with identical results: true, false,"
        " or auto (networks of this package; yours must do the same in every step)",
        choices=("auto", "true", "false"),
        affects_result=False,
    )
    threads: Optional[int] = setting(None, "CPU threads; null: PyTorch's choice", minimum=1, affects_result=False)
    deterministic: bool = setting(
        True, "use deterministic algorithms, required for exact resume on a GPU", affects_result=False
    )
    checkpoint_seconds: float = setting(60.0, "seconds between checkpoints", minimum=0, affects_result=False)
    log_steps: int = setting(
        50, "logging interval of the mean training loss, in steps", minimum=1, affects_result=False
    )

    def validate(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            problem = "both steps and epochs are set" if self.steps else "neither steps nor epochs is set"
            remedy = "set exactly one of training.steps and training.epochs"
            remedy += "; for epochs, add training.steps=null, for steps training.epochs=null" if self.steps else ""
            raise SettingError("steps", self.steps, problem, remedy)
        if self.epochs == 0:
            raise SettingError(
                "epochs", 0, "is no length of a run", "use a value above 0; less than 1 is part of an epoch"
            )
        if not re.fullmatch(r"auto|cpu|mps|xpu|cuda(:\d+)?", self.device):
            raise SettingError("device", self.device, "is not a device", "use auto, cpu, cuda, cuda:NUMBER, xpu or mps")
        if self.clip_norm == 0:
            raise SettingError(
                "clip_norm", 0, "makes all gradients zero", "use a value above 0, or null for no clipping"
            )
        if self.recompute and self.compute != "codes":
            remedy = "set training.compute=codes, or training.recompute=false"
            raise SettingError("recompute", True, "requires compute=codes", remedy)

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
    group: str = setting("", "group of the run at Weights & Biases; sweep files set their name, e.g. cpt/table2")
    tags: list[str] = setting([], "tags at Weights & Biases besides paper, scale and quantizer")
    objective: list[str] = setting(
        ["final"],
        "value that a run returns to an optimising sweeper such as Optuna; a list for several objectives",
        choices=("final", "best", "mean_of_last", "validation", "gbitops", "relative_to_static"),
    )
    tensorboard: bool = setting(False, "write TensorBoard event files into the run folder")
    picture: bool = setting(False, "plot precision, accuracy and loss over steps to picture.png in the run folder")
    progress: bool = setting(True, "show a progress bar if the output is a terminal")

    def validate(self) -> None:
        if not self.objective:
            raise SettingError("objective", [], "names no value", "name one, as logging.objective=[final]")
